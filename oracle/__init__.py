"""What is right: exact arithmetic, admissible sets, recipes, contracts, vendor pins, positions and tables."""

__version__ = "0.1.0"
