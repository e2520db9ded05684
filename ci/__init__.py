"""How a change is gated: command line, runs of the suites, evidence, policy and report."""
