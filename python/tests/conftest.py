"""Shared settings: hypothesis profiles, threads, seeds."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("oracle")  # its asserts count under python -O too

settings.register_profile(
    "default", max_examples=60, deadline=None, derandomize=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("TILEWISE_HYPOTHESIS", "default"))

# Tensors here are tiny, and torch's threads wait for each other in spin loops: on a busy machine two are ten times slower
# than one. Tests that are about threads ask for them by num_threads.
torch.set_num_threads(int(os.environ.get("TILEWISE_TEST_THREADS", "1")))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the programs that tests start

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
