"""``python -m ropecheck.ci``: the command without its script."""

from .cli import main

raise SystemExit(main())
