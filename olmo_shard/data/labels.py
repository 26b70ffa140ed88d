"""The label that marks a token without a training target."""

IGNORE_INDEX = -100
"""Label of a token that has no target: no loss and no gradient is computed for the token."""
