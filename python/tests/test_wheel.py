"""The wheel as users get it: built by pip from the source tree, tagged for what its library needs, loaded by every Python.

Builds the library once more, without CUDA (some minutes); TILEWISE_WHEEL names one that is built already. `-m "not wheel"`
leaves these tests out.
"""

import glob
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VERSIONS = ["3.%d" % n for n in range(9, 14)]
pytestmark = pytest.mark.wheel


def run(*command, **environment):
    # Neither the library nor the package of the surrounding test run.
    env = {k: v for k, v in os.environ.items() if k not in ("TILEWISE_LIBRARY", "PYTHONPATH")}
    return subprocess.run(command, env=dict(env, **environment), capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if os.environ.get("TILEWISE_WHEEL"):
        return os.path.abspath(os.environ["TILEWISE_WHEEL"])
    pytest.importorskip("scikit_build_core")
    pytest.importorskip("auditwheel")
    raw, out = (str(tmp_path_factory.mktemp(name)) for name in ("raw", "wheel"))
    done = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", raw, ".",
               TILEWISE_CUDA="OFF", PATH=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (built,) = glob.glob(raw + "/*.whl")
    done = run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", out, built,
               PATH=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (repaired,) = glob.glob(out + "/*.whl")
    return repaired


@pytest.fixture(scope="module")
def library(wheel, tmp_path_factory):
    with zipfile.ZipFile(wheel) as archive:
        return archive.extract("tilewise/lib/libtilewise.so", tmp_path_factory.mktemp("library"))


def python(version):
    """A CPython of this version, or None."""
    candidates = [shutil.which("python" + version)]
    candidates += glob.glob(os.path.expanduser("~/.pyenv/versions/%s.*/bin/python" % version))
    for path in filter(None, candidates):
        answer = run(path, "-c", "import sys; print('%s %d.%d' % (sys.implementation.name, *sys.version_info[:2]))")
        if answer.returncode == 0 and answer.stdout.strip() == "cpython " + version:
            return path
    return None


def test_tag(wheel):
    """py3-none: any Python 3. manylinux: any distribution with this glibc, or a later one."""
    name = os.path.basename(wheel)
    tag = re.fullmatch(r"tilewise-[\d.]+-py3-none-manylinux_2_(\d+)_x86_64\.whl", name)
    assert tag, name
    assert int(tag[1]) <= int(platform.libc_ver()[1].split(".")[1])
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/WHEEL"))
        assert "Tag: py3-none-manylinux_2_%s_x86_64" % tag[1] in archive.read(metadata).decode()


def test_contents(wheel):
    """The package and one library; nothing grafted from the machine that built it, no tests, no sources."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if ".dist-info/" not in n and not n.endswith("/")]
    assert [n for n in names if not n.endswith(".py")] == ["tilewise/lib/libtilewise.so"]
    package = os.path.join(ROOT, "python", "tilewise")
    sources = glob.glob(os.path.join(package, "**", "*.py"), recursive=True)
    assert set(names) >= {os.path.relpath(path, os.path.dirname(package)) for path in sources}


def test_requires_nothing(wheel):
    """`pip install tilewise` brings neither torch nor NumPy nor CUDA."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert re.search(r"^Requires-Python: >=3\.9$", text, re.M)
    assert all("extra ==" in line for line in re.findall(r"^Requires-Dist: .*$", text, re.M))


@pytest.mark.skipif(not (shutil.which("readelf") and shutil.which("nm")), reason="readelf and nm are not here")
def test_library(library):
    """It needs the C and C++ run times alone, and exports its own functions alone."""
    dynamic = run("readelf", "-d", library).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", dynamic))
    assert "libc.so.6" in needed
    assert needed <= {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2",
                      "librt.so.1", "ld-linux-x86-64.so.2"}  # fmt: skip
    symbols = run("nm", "-D", library).stdout
    assert not re.search(r" U (_?Py|.*(torch|c10|cuda))", symbols)
    exported = re.findall(r" [TBDRVWiu] (\S+)", run("nm", "-D", "--defined-only", library).stdout)
    assert exported and all(name.startswith("tw_") for name in exported)


@pytest.mark.parametrize("version", VERSIONS)
def test_loads_on(version, wheel, tmp_path):
    """Installed by that Python's own pip, alone; loaded; a plan made, an error raised, a sum of exponentials taken."""
    path = python(version)
    if path is None:
        pytest.skip("there is no CPython %s here" % version)
    folder = str(tmp_path)
    if run(path, "-m", "pip", "--version").returncode == 0:
        done = run(path, "-m", "pip", "install", "--no-index", "--no-deps", "--target", folder, wheel)
        assert done.returncode == 0, done.stderr
    else:
        zipfile.ZipFile(wheel).extractall(folder)
    code = """
import array, ctypes, math, sys
sys.path.insert(0, %r)
import tilewise
from tilewise import _abi, _call, _library
assert not {"torch", "numpy"} & set(sys.modules)
assert tilewise.library_path.startswith(%r)
assert tilewise.plan("fwd f32 b=1 hq=1 sq=64 d=16").kernel
try:
    tilewise.plan("fwd nonsense")
except tilewise.InvalidArgument as error:
    assert "nonsense" in str(error)
x, y, lse = array.array("f", [1, 2, 3]), array.array("f", [0] * 3), array.array("f", [0])
view = lambda a: (a.buffer_info()[0], _abi.FLOAT32, 0, 0, 1, len(a), 0, 0, 0, 1, 0, 0, 0)
with _call.Tensors(view(x), view(y), view(lse)) as (x_at, y_at, lse_at):
    _library.check(_library.lib.tw_softmax(x_at, y_at, lse_at, None, None))
assert abs(lse[0] - math.log(sum(map(math.exp, x)))) < 1e-6 and abs(sum(y) - 1) < 1e-6
print("loaded on %%d.%%d" %% sys.version_info[:2])
""" % (folder, folder)
    done = run(path, "-m", "compileall", "-q", os.path.join(folder, "tilewise"))  # the modules that need torch or NumPy too
    assert done.returncode == 0, done.stdout
    done = run(path, "-I", "-c", code)
    assert done.returncode == 0 and done.stdout.strip() == "loaded on " + version, done.stdout + done.stderr
