"""The committed generated code is what the .proto files say, and loads on protobuf 5, 6 and 7."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradpilot.protos.codec import dumps
from gradpilot.protos.messages import Assignment, Option, Plan
from tests.conftest import require_tool

ROOT = Path(__file__).parents[2]
GENERATE = ROOT / "protos" / "generate.sh"
CANNOT_MAKE_TOOLS = 3
"""Exit status of generate.sh where its tools cannot be installed."""

ENVIRON = dict(os.environ)
"""As the session was started: tests take proxies away, pip may need one."""

RUNTIMES = [("5.29.5", "1.71.2"), ("6.33.5", "1.76.0"), ("7.36.2", "1.85.3")]
"""Releases of protobuf that training images pin, each with a grpcio of its time."""

ROUND_TRIP = """
import google.protobuf, grpc, sys
assert google.protobuf.__version__ == sys.argv[1], google.protobuf.__version__
assert grpc.__version__ == sys.argv[2], grpc.__version__
from gradpilot.protos import codec, jsoncodec
from gradpilot.protos.messages import *
from gradpilot.protos.v1 import controller_pb2_grpc, operator_pb2_grpc
plan = Plan(3, 7, "0123", (Assignment("b", Option("topk", 0.25)),))
hello = Hello("r", "m", "1", 0, 2, plan=plan)
envelope = codec.encode_agent(hello)
assert codec.decode_agent(type(envelope).FromString(envelope.SerializeToString())) == hello
bucket = BucketReport(0, 0.1, 0.1, 0.1, 0.1, 8, energy=(0.5, 1.0))
report = Report("x", 0, 0, 1, 0, 0, 0.1, 0.1, 0.0, (WireSample(1, -1, 0, "ring", 8, 1, 0.1),),
                (bucket,))
assert repr(codec.decode(codec.encode(report))) == repr(report)
assert jsoncodec.from_json(Hello, jsoncodec.to_json(hello)) == hello
for bad in (b"\\xff", codec.dumps(plan)[:-1]):
    try:
        codec.loads(bad)
    except codec.ProtocolError:
        continue
    raise AssertionError(bad)
controller_pb2_grpc.ControllerServiceStub(grpc.insecure_channel("localhost:1"))
operator_pb2_grpc.OperatorServiceStub(grpc.insecure_channel("localhost:1"))
print(codec.dumps(plan).hex())
"""


def generate(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [script, *arguments], env=ENVIRON, capture_output=True, text=True, check=False
    )

    def grpcio_tools() -> bool:
        return done.returncode != CANNOT_MAKE_TOOLS

    require_tool(grpcio_tools, "needs a package index with the packages of protos/tools.txt")
    return done


@pytest.mark.tools
@pytest.mark.timeout(300)
def test_committed_code_is_up_to_date() -> None:
    done = generate(GENERATE, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.tools
@pytest.mark.timeout(300)
def test_drift_is_found_and_mended(tmp_path: Path) -> None:
    generate(GENERATE, "--check")  # makes the tools
    protos = tmp_path / "protos"
    shutil.copytree(ROOT / "protos", protos, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "gradpilot").mkdir()
    (tmp_path / "gradpilot" / "protos").symlink_to("../protos")
    (tmp_path / ".venv-protos").symlink_to(ROOT / ".venv-protos")
    script = protos / "generate.sh"
    stub, stale = protos / "v1" / "types_pb2.pyi", protos / "v1" / "types_pb2_grpc.py"
    right = stub.read_text()

    stub.write_text(right + "# edited\n")
    found = generate(script, "--check")
    assert found.returncode == 1
    assert "-# edited" in found.stdout
    stub.write_text(right)
    stale.touch()
    assert generate(script, "--check").returncode == 1
    stub.unlink()

    assert generate(script).returncode == 0
    assert stub.read_text() == right
    assert not stale.exists()
    before = {path: path.stat().st_mtime_ns for path in (protos / "v1").iterdir()}
    assert generate(script).returncode == 0
    assert before == {path: path.stat().st_mtime_ns for path in (protos / "v1").iterdir()}


def test_generate_refuses_unknown_arguments() -> None:
    done = generate(GENERATE, "--chek")
    assert done.returncode == 2
    assert "expected no argument or --check, got '--chek'" in done.stderr


def runtime(protobuf: str, grpcio: str) -> Path:
    """Return a folder with just these packages, installed once and kept beside the tools."""
    folder = ROOT / ".venv-protos-runtimes" / f"{protobuf}-{grpcio}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        packages = [f"protobuf=={protobuf}", f"grpcio=={grpcio}"]
        done = subprocess.run(
            [*command, *packages], env=ENVIRON, capture_output=True, text=True, check=False
        )

        def installed() -> bool:
            return done.returncode == 0

        installed.__name__ = " ".join(packages)
        why = done.stderr.strip().rpartition("\n")[2]
        require_tool(installed, f"needs a package index: {why}")
        (folder / "complete").touch()  # last: a folder without it is made again
    return folder


@pytest.mark.tools
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("protobuf", "grpcio"), RUNTIMES)
def test_codec_works_on_every_protobuf_that_images_pin(protobuf: str, grpcio: str) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{runtime(protobuf, grpcio)}{os.pathsep}{ROOT}"}
    # -S leaves out this interpreter's own packages, -W error turns protobuf's warnings into errors.
    command = [sys.executable, "-S", "-W", "error", "-c", ROUND_TRIP, protobuf, grpcio]
    done = subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # All runtimes write the same bytes.
    plan = Plan(3, 7, "0123", (Assignment("b", Option("topk", 0.25)),))
    assert done.stdout.strip() == dumps(plan).hex()
