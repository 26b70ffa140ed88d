"""Checks of the kernels, the exchanges and the training steps on a GPU, and their times."""
