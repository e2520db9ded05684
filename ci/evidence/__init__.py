"""Evidence: the record that a run leaves, written, read, joined, packed and compared.

A folder, or one file made of it. It is data: nothing in it is run or unpickled. The manifest is written last, so that
a folder without one is half-written; it detects accidents, not forgery, and authenticity comes from an attestation or
from review.
"""
