"""The Slurm script, run with stand-ins for Slurm's commands and the real controller."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.tools import ROOT

SCRIPT = ROOT / "deploy" / "slurm" / "train.sbatch"

SCONTROL = """\
#!/bin/bash
[[ $1 == show && $2 == hostnames && $3 == "$SLURM_JOB_NODELIST" ]] && printf '127.0.0.1\\nnode2\\n'
"""

# Notes how it was called, and whether a controller answers at that moment.
SRUN = """\
#!{python}
import json, os, socket, sys
address = os.environ["GRADPILOT_CONTROLLER"]
answers = False
if address != "off":
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
        answers = True
    except OSError:
        pass
with open("called.json", "w") as file:
    json.dump({{"argv": sys.argv[1:], "address": address, "answers": answers}}, file)
sys.exit({code})
"""

BROKEN_CONTROLLER = "#!/bin/bash\necho no >&2\nexit 1\n"

EXPECTED = [
    "--kill-on-bad-exit=1",
    "torchrun",
    "--nnodes=2",
    "--nproc-per-node=4",
    "--rdzv-id=slurm-42",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=127.0.0.1:29400",
    "-m",
    "gradpilot.worker_agent",
    "train.py",
    "--name",
    "two words",
]


class Cluster:
    """A folder with stand-ins, in which the script is run as Slurm would run it."""

    def __init__(self, folder: Path, code: int = 0) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        self.install("scontrol", SCONTROL)
        self.install("srun", SRUN.format(python=sys.executable, code=code))

    def install(self, name: str, text: str) -> None:
        file = self.folder / "bin" / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = [str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        return subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            cwd=self.folder,
            env={
                "PATH": ":".join(path),
                "HOME": str(self.folder),
                "TMPDIR": str(self.folder),
                "SLURM_JOB_ID": "42",
                "SLURM_NNODES": "2",
                "SLURM_JOB_NODELIST": "node[1-2]",
                "RANKS_PER_NODE": "4",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=50,
        )

    def called(self) -> dict[str, object]:
        read: dict[str, object] = json.loads((self.folder / "called.json").read_text())
        return read


def running(folder: Path) -> list[str]:
    """Return the command lines of processes that were started with files of a folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


def test_directives() -> None:
    """Each #SBATCH line holds one long option of sbatch, before the first command."""
    text = SCRIPT.read_text()
    head, _, body = text.partition("\nset -euo pipefail\n")
    assert "#SBATCH" not in body
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", head, re.MULTILINE))
    assert len(options) == head.count("#SBATCH ")
    assert options["ntasks-per-node"] == "1"  # torchrun starts the ranks
    assert options.keys() == {
        "job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "signal", "output",
    }  # fmt: skip
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_usage(tmp_path: Path) -> None:
    done = Cluster(tmp_path).run()
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr


@pytest.mark.parametrize("code", [0, 7])
def test_job_starts_and_stops_its_own_controller(tmp_path: Path, code: int) -> None:
    cluster = Cluster(tmp_path, code)
    done = cluster.run("train.py", "--name", "two words")
    assert done.returncode == code, done.stderr
    called = cluster.called()
    assert called["argv"] == EXPECTED
    assert called["answers"], (tmp_path / "gradpilot-controller-42.log").read_text()
    assert running(tmp_path) == []
    assert list(tmp_path.glob("gradpilot-42.*")) == []


def test_shared_controller_is_used(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    done = cluster.run("train.py", GRADPILOT_CONTROLLER="127.0.0.1:1")
    assert done.returncode == 0, done.stderr
    assert cluster.called()["address"] == "127.0.0.1:1"
    assert not (tmp_path / "gradpilot-controller-42.log").exists()


def test_training_runs_without_a_controller(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.install("gradpilot", BROKEN_CONTROLLER)
    done = cluster.run("train.py")
    assert done.returncode == 0
    assert cluster.called()["address"] == "off"
    assert "did not start" in done.stderr
