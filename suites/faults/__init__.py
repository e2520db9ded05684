"""The fault dictionary: ways to be wrong, the wrong candidates that they make, and what they explain."""
