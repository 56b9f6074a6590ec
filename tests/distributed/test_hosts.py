"""Training over several hosts: two nodes of torchrun, on one host and on two that have a network of their own."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from one_process import credo_here
from safetensors.torch import load_file

TRAIN = [
    "train",
    "model.hidden=[16]",
    "method.lr=0.003",
    "training.epochs=2",
    "training.batch_size=64",
    "training.examples=512",
    "training.validation=0",
    "--noise=shared",  # then processes make the draws of one
    "--draws=4",
    "--run",
]
PATIENCE = 400.0  # seconds until a test gives up; torchrun itself waits 300 for a node that does not end


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a single process."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    credo_here([*TRAIN, str(folder)])
    return folder


def torchrun(rank: int, endpoint: str, folder: Path, options: Sequence[str] = ()) -> list[str]:
    """One of two nodes, with one process."""
    nodes = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", folder.name]
    start = [sys.executable, "-m", "torch.distributed.run", *nodes, *meeting, *options]
    # Without the dashes, torchrun takes --run for its own --run-path.
    return [*start, "-m", "--", "credo", *TRAIN, str(folder)]


def run_both(commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]) -> None:
    common = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    common |= {"OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        # Into files: what each of them said is there to read, also if another one never ends.
        said = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        nodes = [
            stack.enter_context(subprocess.Popen(c, env=common | e, stdout=out, stderr=subprocess.STDOUT))
            for c, e, out in zip(commands, environments, said, strict=True)
        ]
        stack.callback(lambda: [node.kill() for node in nodes])
        limit = time.monotonic() + PATIENCE
        while any(node.poll() is None for node in nodes) and time.monotonic() < limit:
            time.sleep(0.1)
        codes = [node.returncode for node in nodes]
        for out in said:
            out.seek(0)
        assert codes == [0, 0], "\n".join(f"-- exit code {c}\n{out.read()}" for c, out in zip(codes, said, strict=True))


def assert_same_run(folder: Path, reference: Path) -> None:
    ours, theirs = (load_file(place / "model.safetensors") for place in (folder, reference))
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if value.is_floating_point():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    ours, theirs = (json.loads((place / "result.json").read_text()) for place in (folder, reference))
    assert ours["test"]["accuracy"] == pytest.approx(theirs["test"]["accuracy"], abs=0.005)
    assert ours["test"]["nll"] == pytest.approx(theirs["test"]["nll"], rel=1e-3)


def test_two_nodes_on_one_host_equal_one_process(reference: Path, tmp_path: Path) -> None:
    if shutil.which("ip") is not None and os.geteuid() == 0:
        with network_namespaces() as (_, problem):
            if not problem:
                pytest.skip("two hosts of their own are possible here, and their test does the same and more")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    folder = tmp_path / "two"
    alone = ["--local-addr", "127.0.0.1"]
    run_both([torchrun(rank, endpoint, folder, alone) for rank in (0, 1)], [{}, {}])
    assert_same_run(folder, reference)


# -- hosts of their own -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """A network namespace: an address, and the interface that has it."""

    namespace: str
    interface: str
    address: str

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *command]

    def received(self) -> int:
        path = f"/sys/class/net/{self.interface}/statistics/rx_bytes"
        done = subprocess.run(self.command("cat", path), capture_output=True, text=True, check=True)
        return int(done.stdout)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two network namespaces joined by a cable, where the machine allows them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the program `ip` (iproute2)")
    with network_namespaces() as (found, problem):
        if problem:
            pytest.skip(f"this machine allows no network namespaces: {problem}")
        yield found


@contextmanager
def network_namespaces() -> Iterator[tuple[list[Host], str]]:
    """Two hosts, and why there are none."""
    mark = uuid.uuid4().hex[:6]
    found = [Host(f"credo-{mark}-{i}", f"cr{mark}{i}", f"10.213.77.{i + 1}") for i in (0, 1)]
    try:
        yield found, next((problem for problem in map(run_ip, setting_up(found)) if problem), "")
    finally:
        for host in found:
            run_ip(["netns", "delete", host.namespace])  # takes its end of the cable with it
        run_ip(["link", "delete", found[0].interface])


def setting_up(hosts: Sequence[Host]) -> Iterator[list[str]]:
    first, second = hosts
    yield from (["netns", "add", host.namespace] for host in hosts)
    yield ["link", "add", first.interface, "type", "veth", "peer", "name", second.interface]
    for host in hosts:
        inside = ["-n", host.namespace]
        yield ["link", "set", host.interface, "netns", host.namespace]
        yield [*inside, "address", "add", f"{host.address}/24", "dev", host.interface]
        yield from ([*inside, "link", "set", interface, "up"] for interface in ("lo", host.interface))


def run_ip(arguments: list[str]) -> str:
    """What `ip` complains of."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"ip {' '.join(arguments)}: {done.stderr.strip()}"


@pytest.mark.grid
def test_two_hosts_equal_one_process(reference: Path, tmp_path: Path, hosts: list[Host]) -> None:
    folder = tmp_path / "hosts"
    endpoint = f"{hosts[0].address}:29400"
    commands = []
    for rank, host in enumerate(hosts):
        # By its name, which both have, torchrun would not know that the first is the one to meet at.
        where = ["--local-addr", host.address, "--rdzv-conf", f"is_host={int(rank == 0)}"]
        commands.append(host.command(*torchrun(rank, endpoint, folder, where)))
    run_both(commands, [{"GLOO_SOCKET_IFNAME": host.interface} for host in hosts])
    assert_same_run(folder, reference)
    steps, weights = 16, 64 * 16 + 16 + 16 * 10 + 10
    # Means and standard deviations in single precision, at every step: they can only have come by the cable.
    assert all(host.received() > steps * 2 * weights * 4 for host in hosts)
