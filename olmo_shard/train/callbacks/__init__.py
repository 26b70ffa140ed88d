"""Callbacks: everything around the step that is not the step."""

from olmo_shard.train.callbacks.base import Callback, RunInfo

__all__ = ["Callback", "RunInfo"]
