"""The errors that a user sees: one clear message, no traceback, a stable exit code."""


class OlmoShardError(Exception):
    """Base of all errors whose message is meant for the person at the terminal."""

    exit_code = 1


class ConfigurationError(OlmoShardError):
    """A config field, an override or a combination of them is wrong."""

    exit_code = 2


class NothingLeftError(ConfigurationError):
    """A run is at its end already."""


class DataError(OlmoShardError):
    """A source, a token file or a tokenizer cannot be used."""

    exit_code = 2


class LaunchError(OlmoShardError):
    """The launcher's variables are missing or contradict each other."""

    exit_code = 2


class CheckpointError(OlmoShardError):
    """A checkpoint is missing, incomplete or does not fit the model."""

    exit_code = 2


class HeapError(OlmoShardError):
    """A symmetric heap cannot be made here."""

    exit_code = 2


class TrainingError(OlmoShardError):
    """Training cannot go on: too many skipped steps, a lost peer."""


class LostPeerError(TrainingError):
    """Another rank is gone, or gives no sign in time: a consequence of something else."""
