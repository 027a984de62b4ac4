"""The primitive ops, one file a family: type rule, NumPy reference and gradient of each stand together.

The functions that users call are in `dynbatch.functions`; `record` has what is between the two.
"""
