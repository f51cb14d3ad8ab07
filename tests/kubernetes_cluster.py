"""A real Kubernetes for tests: a control plane and two nodes, each in a network namespace of its own on this machine.

etcd, API server, controllers, scheduler and kubelets are one program, which `make kubernetes` compiles once from
tests/kubernetes/hyper; containerd, runc and the network plugins are Debian's. Pods have addresses, host names, process
ids and memory limits of their own. It takes root, and cgroups of version 1. Not there: DNS and services.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kubernetes_image
from broker import CACHE
from clusters import wait

SOURCE = Path(__file__).parent / "kubernetes" / "hyper"
HYPER = Path(
    os.environ.get("TRITIUM_KUBERNETES")
    or CACHE
    / f"kubernetes-{uuid.uuid5(uuid.NAMESPACE_OID, (SOURCE / 'go.mod').read_text() + (SOURCE / 'main.go').read_text())}"
    / "hyper"
)
PLUGINS = Path("/usr/lib/cni")
STATE = Path("/run/tritium-k8s")
"""The nodes' sockets and mounts: a path of a socket has at most 108 characters."""
CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd")
NODES = 2
HERE, SERVER = "10.180.0.1", "10.180.0.2"
"""The addresses of this machine, and of the API server's namespace; node n has 10.180.0.10+n, its pods 10.181.n.x."""
NODE_BYTES = 6 << 30
"""The memory of a node that pods may ask for; the rest of the machine's is reserved."""

CONTAINERD = """
version = 2
root = "{folder}/containerd"
state = "{state}"
disabled_plugins = [{disabled}]
[grpc]
  address = "{state}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
        Root = "{state}/runc"
"""
_NOT_NEEDED = ", ".join(f'"io.containerd.snapshotter.v1.{name}"' for name in ("aufs", "btrfs", "zfs", "devmapper"))
_NOT_NEEDED += ', "io.containerd.internal.v1.opt"'  # It makes a folder in /opt.
FOLDERS = "/var/tmp/kubernetes-"
"""The beginning of a cluster's folder: short, as the paths of sockets are."""


def missing() -> str | None:
    """Return why no Kubernetes can be started here; None where one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Kubernetes of namespaces and cgroups takes root on Linux"
    if not HYPER.exists():
        return f"the Kubernetes at {HYPER} is not there: `make kubernetes` compiles it, once, in 11 minutes of a core"
    for program in ("containerd", "ctr", "runc", "ip", "nsenter", "gcc", "openssl"):
        if shutil.which(program) is None:
            return f"a Kubernetes takes {program} (Debian: containerd runc containernetworking-plugins iproute2 gcc)"
    if not (PLUGINS / "bridge").exists():
        return f"a Kubernetes takes the network plugins in {PLUGINS} (Debian: containernetworking-plugins)"
    if not (CGROUPS / "memory" / "cgroup.procs").exists():
        return "the Kubernetes of these tests is written for cgroups of version 1, and has not been tried on version 2"
    return None


class Kubernetes:
    """A running Kubernetes. Its user is a member of `system:masters`.

    folder : where state, logs and certificates are.
    """

    url = f"https://{SERVER}:6443"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(16)
        self.certificate = folder / "pki" / "apiserver.crt"
        self.kubeconfig = folder / "kubeconfig"
        self._daemons: list[subprocess.Popen[Any]] = []

    def call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """Call the API server, and return its answer. Raises HTTPError and URLError."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": kind},
        )
        context = ssl.create_default_context(cafile=str(self.certificate))
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            text = answer.read()
        return json.loads(text) if text[:1] == b"{" else text.decode()

    def pods(self, role: str = "executor") -> list[Any]:
        """Return the pods of Spark's that have this role."""
        items: list[Any] = self.call("GET", f"/api/v1/namespaces/default/pods?labelSelector=spark-role%3D{role}")[
            "items"
        ]
        return items

    def delete(self, pod: str, seconds: int | None = None) -> None:
        """Delete a pod within its grace period; with `seconds=0` by force, without its node's word."""
        grace = "" if seconds is None else f"?gracePeriodSeconds={seconds}"
        self.call("DELETE", f"/api/v1/namespaces/default/pods/{pod}{grace}")

    def processes(self, pod: dict[str, Any]) -> list[int]:
        """Return the processes of a pod, by this machine's ids."""
        groups = CGROUPS / "pids" / namespace(pod["spec"]["nodeName"])
        folders = groups.glob(f"kubepods/*/pod{pod['metadata']['uid']}/*/cgroup.procs")
        return [int(pid) for folder in folders for pid in folder.read_text().split()]

    def link(self, node: str, state: str) -> None:
        """Cut a node off ("down"), or connect it again ("up")."""
        run("ip", "link", "set", f"kb0-{node}", state)

    def client_conf(self) -> dict[str, str]:
        """Return the settings of a session whose driver is this process, and whose executors are two pods."""
        return {
            "spark.kubernetes.container.image": kubernetes_image.SPARK,
            "spark.kubernetes.container.image.pullPolicy": "Never",
            "spark.kubernetes.authenticate.caCertFile": str(self.certificate),
            "spark.kubernetes.authenticate.oauthToken": self.token,
            "spark.driver.host": HERE,
            "spark.driver.bindAddress": HERE,
            "spark.executor.instances": "2",
            "spark.executor.memoryOverhead": "1500m",
            "spark.kubernetes.executor.request.cores": "0.5",
            **kubernetes_image.mounts("executor"),
        }

    def start(self, features: str = "", apis: str = "") -> None:
        """Start the control plane and the nodes, and wait until the nodes are ready.

        features, apis : alpha features and their API groups, as `--feature-gates` and `--runtime-config` take them.
        """
        run("ip", "link", "add", "kb0", "type", "bridge")
        run("ip", "addr", "add", f"{HERE}/24", "dev", "kb0")
        run("ip", "link", "set", "kb0", "up")
        gates = ["--feature-gates", features] if features else []
        self._join("control", SERVER)
        self._start_control_plane(gates, ["--runtime-config", apis] if apis else [])
        images = self.folder / "images.tar"
        kubernetes_image.write(images)
        names = [f"n{number}" for number in range(1, NODES + 1)]
        for number, name in enumerate(names, 1):
            self._join(name, f"10.180.0.{10 + number}")
        for number, name in enumerate(names, 1):
            route = (f"10.181.{number}.0/24", "via", f"10.180.0.{10 + number}")
            run("ip", "route", "add", *route)
            for other in ("control", *names):
                if other != name:
                    run("ip", "-n", namespace(other), "route", "add", *route)
            self._start_containerd(name, number)
        for number, name in enumerate(names, 1):
            containerd = STATE / name / "containerd.sock"
            wait(lambda: ok("ctr", "-a", containerd, "version"), f"containerd of {name} answers")  # noqa: B023
            run("ctr", "-a", containerd, "-n", "k8s.io", "images", "import", images)
            self._start_kubelet(name, number, gates)
        wait(lambda: self._ready() == set(names), "all nodes are ready")
        wait(lambda: self._answers("/api/v1/namespaces/default/serviceaccounts/default"), "pods have an account")

    def _join(self, name: str, address: str) -> None:
        """Make a network namespace with this address, and a cable to it."""
        place, cable = namespace(name), f"kb0-{name}"
        run("ip", "netns", "add", place)
        run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", place)
        run("ip", "link", "set", cable, "master", "kb0", "up")
        run("ip", "-n", place, "link", "set", "lo", "up")
        run("ip", "-n", place, "link", "set", "eth0", "up")
        run("ip", "-n", place, "addr", "add", f"{address}/24", "dev", "eth0")

    def _start_control_plane(self, gates: list[str], apis: list[str]) -> None:
        keys = self.folder / "pki"
        keys.mkdir()
        run("openssl", "genrsa", "-out", keys / "sa.key", "2048")
        run("openssl", "rsa", "-in", keys / "sa.key", "-pubout", "-out", keys / "sa.pub")
        (keys / "tokens").write_text(f"{self.token},admin,admin,system:masters\n")
        # In block form: Spark's client takes a file that begins with a brace for JSON.
        self.kubeconfig.write_text(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
            "contexts: [{name: c, context: {cluster: k, user: admin}}]\n"
            f'clusters: [{{name: k, cluster: {{server: "{self.url}", certificate-authority: {self.certificate}}}}}]\n'
            f"users: [{{name: admin, user: {{token: {self.token}}}}}]\n"
        )
        etcd, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        store = ["--data-dir", self.folder / "etcd", "--unsafe-no-fsync", "--log-level", "warn"]
        store += ["--listen-client-urls", etcd, "--advertise-client-urls", etcd, "--listen-peer-urls", peer]
        self._daemon(
            "control", "etcd", *store, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"
        )
        server = ["--etcd-servers", etcd, "--bind-address", SERVER, "--advertise-address", SERVER]
        server += ["--secure-port", "6443", "--cert-dir", keys, "--service-cluster-ip-range", "10.182.0.0/24"]
        server += ["--service-account-issuer", "https://kubernetes.default.svc"]
        server += ["--service-account-key-file", keys / "sa.pub", "--service-account-signing-key-file", keys / "sa.key"]
        server += ["--token-auth-file", keys / "tokens", "--authorization-mode", "Node,RBAC", "--allow-privileged"]
        # Else the logs of a pod are asked for by the name of its node, which no DNS knows.
        server += ["--kubelet-preferred-address-types", "InternalIP", *apis]
        self._daemon("control", "apiserver", *server, *gates)
        wait(lambda: self._answers("/readyz"), "the API server is ready")
        as_admin = ["--kubeconfig", self.kubeconfig, "--leader-elect=false"]
        controllers = ["--service-account-private-key-file", keys / "sa.key", "--root-ca-file", self.certificate]
        controllers += ["--node-monitor-grace-period", "20s"]
        self._daemon("control", "controller-manager", *as_admin, *controllers, *gates)
        self._daemon("control", "scheduler", *as_admin, *gates)

    def _start_containerd(self, name: str, number: int) -> None:
        folder, state = self.folder / name, STATE / name
        for path in (folder / "cni", folder / "logs", folder / "plugins", state):
            path.mkdir(parents=True)
        for controller in CONTROLLERS:
            group = CGROUPS / controller / namespace(name)
            group.mkdir(exist_ok=True)
            if controller == "cpuset":  # Empty at first, and then no process can be in it.
                for values in ("cpuset.cpus", "cpuset.mems"):
                    (group / values).write_text((CGROUPS / controller / values).read_text())
            if controller == "cpu":  # Else all pods of a node together weigh as much as one other process.
                (group / "cpu.shares").write_text("16384")
        network = {
            "type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False,
            "ipam": {
                "type": "host-local", "dataDir": f"{folder}/ipam", "ranges": [[{"subnet": f"10.181.{number}.0/24"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }  # fmt: skip
        networks = {"cniVersion": "0.4.0", "name": "pods", "plugins": [network]}
        (folder / "cni" / "10.conflist").write_text(json.dumps(networks))
        conf = folder / "containerd.toml"
        pause = kubernetes_image.PAUSE
        values = {"folder": folder, "state": state, "plugins": PLUGINS, "pause": pause, "disabled": _NOT_NEEDED}
        conf.write_text(CONTAINERD.format(**values))
        self._daemon(name, "containerd", "-c", conf)

    def _start_kubelet(self, name: str, number: int, gates: list[str]) -> None:
        folder = self.folder / name
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        conf = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{STATE / name}/containerd.sock",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{namespace(name)}",  # Else two kubelets delete each other's pods.
            "failSwapOn": False,
            "podLogsDir": f"{folder}/logs",
            "volumePluginDir": f"{folder}/plugins",
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "systemReserved": {"memory": str(max(0, total - NODE_BYTES))},
            "nodeStatusUpdateFrequency": "2s",
        }
        (folder / "kubelet.json").write_text(json.dumps(conf))
        options = [
            "--config",
            folder / "kubelet.json",
            "--kubeconfig",
            self.kubeconfig,
            "--root-dir",
            folder / "kubelet",
        ]
        options += ["--cert-dir", folder / "pki", "--hostname-override", name, "--node-ip", f"10.180.0.{10 + number}"]
        self._daemon(name, "kubelet", *options, *gates)

    def _daemon(self, node: str, program: str, *options: Any) -> None:
        """Start a part in the network namespace of a node; `remove` ends it by that.

        `ip netns exec` would hide the cgroups.
        """
        command = [program] if program == "containerd" else [str(HYPER), program]
        command = ["nsenter", f"--net=/run/netns/{namespace(node)}", *command, *map(str, options)]
        with (self.folder / f"{node}-{program}.log").open("w") as log:
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self._daemons.append(daemon)

    def reap(self) -> None:
        """Wait for the parts that `remove` has killed."""
        for daemon in self._daemons:
            daemon.wait()

    def _answers(self, path: str) -> bool:
        try:
            self.call("GET", path)
        except (OSError, ssl.SSLError):
            return False
        return True

    def _ready(self) -> set[str]:
        ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
        if ended:
            raise RuntimeError(f"parts of the Kubernetes have ended: {ended}")
        nodes = self.call("GET", "/api/v1/nodes")["items"]
        return {
            node["metadata"]["name"]
            for node in nodes
            for condition in node["status"].get("conditions", ())
            if (condition["type"], condition["status"]) == ("Ready", "True")
        }

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in self.folder.glob("*.log"))


def namespace(node: str) -> str:
    """Return the name of a node's network namespace, and of its cgroups."""
    return f"tritium-k8s-{node}"


def run(*command: Any) -> str:
    """Run a command, and return its output. Raises RuntimeError with what it said."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr or done.stdout}")
    return done.stdout


def ok(*command: Any) -> bool:
    """Tell whether a command succeeds."""
    return subprocess.run([*map(str, command)], capture_output=True, timeout=60, check=False).returncode == 0


@contextlib.contextmanager
def kubernetes(features: str = "", apis: str = "") -> Iterator[Kubernetes]:
    """Yield a running Kubernetes; afterwards nothing of it is left. One at a time on a machine: others wait.

    Skips the test where none can be started.
    """
    if why_not := missing():
        pytest.skip(why_not)
    CACHE.mkdir(parents=True, exist_ok=True)
    folders = tempfile.TemporaryDirectory(prefix=Path(FOLDERS).name, dir=Path(FOLDERS).parent)
    with (CACHE / "kubernetes.lock").open("w") as lock, folders as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove()  # What a process left that was killed.
        cluster = Kubernetes(Path(folder))
        try:
            cluster.start(features, apis)
            yield cluster
        except BaseException:
            print(cluster.logs(), file=sys.stderr)
            raise
        finally:
            remove()
            cluster.reap()


def remove() -> None:
    """Kill the processes of all nodes and pods, and remove their mounts, namespaces, links and cgroups."""
    names = [line.split()[0] for line in run("ip", "netns", "list").splitlines()]
    places = [name for name in names if name.startswith(namespace(""))]
    wait(lambda: not _killed(places), "its processes have ended")
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in reversed(mounts):
        if mount.startswith((f"{STATE}/", FOLDERS)):
            ok("umount", "-l", mount)
    for name in places:
        run("ip", "netns", "del", name)
    for link in ("kb0", *(f"kb0-{name.removeprefix(namespace(''))}" for name in places)):
        ok("ip", "link", "del", link)
    shutil.rmtree(STATE, ignore_errors=True)
    for group in CGROUPS.glob(f"*/{namespace('')}*"):
        for path, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(path)
    for log in Path("/var/log/containers").glob("*.log"):
        if os.readlink(log).startswith(FOLDERS):
            log.unlink()
    for result in Path("/var/lib/cni/results").glob("*"):  # Each names the namespace of a pod.
        if f"{STATE}/" in result.read_text():
            result.unlink()
    for path in Path("/run/containerd/s").glob("*"):
        with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == errno.ECONNREFUSED:  # Of a shim that has ended, whoever's.
                path.unlink()


def _killed(places: list[str]) -> set[int]:
    """Send SIGKILL to what still runs in these namespaces and in the nodes' cgroups, and return that."""
    pids = {int(pid) for place in places for pid in run("ip", "netns", "pids", place).split()}
    for group in CGROUPS.glob(f"pids/{namespace('')}*"):
        for path, _, _ in os.walk(group):
            with contextlib.suppress(OSError):
                pids |= {int(pid) for pid in Path(path, "cgroup.procs").read_text().split()}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids
