"""What every test runs under: one thread, no network, no display; and where local corpora are."""

import os
from pathlib import Path

# Read by libraries when they are first imported, hence set before any test module is.
os.environ["OMP_NUM_THREADS"] = "1"  # torch's threads: xdist already runs one process per core
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"

import pytest
from hypothesis import settings

# A busy machine makes an example slow, not wrong.
settings.register_profile("deepenough", deadline=None)
settings.load_profile("deepenough")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of local corpora; a test that needs it is skipped on a machine without one."""
    folder = os.environ.get("DEEPENOUGH_DATA")
    if not folder:
        pytest.skip("DEEPENOUGH_DATA is not set: no local corpora on this machine")
    return Path(folder)
