"""Shared settings: hypothesis profiles, threads, seeds, and the device: TILEWISE_TEST_DEVICE=cuda runs the tests on CUDA tensors."""

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

DEVICE = os.environ.get("TILEWISE_TEST_DEVICE", "cpu")
if DEVICE != "cpu":
    torch.set_default_device(DEVICE)  # of every tensor that a test makes
    torch.backends.cuda.matmul.allow_tf32 = False
    # Of the CPU alone: NumPy, DLPack and packaging; what a call checks by reading lengths; the examples' files.
    collect_ignore = ["test_numpy.py", "test_package.py", "test_examples.py", "test_validation.py"]
else:
    collect_ignore = ["test_cuda.py"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """float64 is of the CPU's reference alone: on a GPU it is refused by name, and that is all a test can see."""
    try:
        return (yield)
    except Exception as error:
        if DEVICE == "cuda" and "dtype f64: takes" in str(error):
            pytest.skip("float64 on CUDA")
        raise


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
