"""Programs around the package. From the root of the repository: ``python -m scripts.NAME``."""
