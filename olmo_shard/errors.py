"""Errors for users: one clear message without a traceback, and a stable exit code."""


class OlmoShardError(Exception):
    """Base class of all errors whose message is for the person at the terminal."""

    exit_code = 1


class ConfigurationError(OlmoShardError):
    """A config field, an override, or a combination of them is wrong."""

    exit_code = 2


class NothingLeftError(ConfigurationError):
    """The run has reached its end already, so there is no step to train."""


class DataError(OlmoShardError):
    """A source, a token file or a tokenizer cannot be used."""

    exit_code = 2


class LaunchError(OlmoShardError):
    """The launcher's environment variables are missing or contradict each other."""

    exit_code = 2


class CheckpointError(OlmoShardError):
    """A checkpoint is missing, incomplete, or does not fit the model."""

    exit_code = 2


class HeapError(OlmoShardError):
    """A symmetric heap cannot be created on this machine."""

    exit_code = 2


class TrainingError(OlmoShardError):
    """Training cannot continue, for example after too many skipped steps in a row."""


class LostPeerError(TrainingError):
    """Another rank has ended, or has not answered in time. The cause is on that rank."""
