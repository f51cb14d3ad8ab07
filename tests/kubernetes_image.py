"""The two images of the test cluster, as a tar file for `ctr images import`.

PAUSE is a static program that waits. SPARK holds nothing but mount points, symbolic links and an entry point: the
machine's /usr, Java, Python and virtual environment come in as volumes (`mounts`), instead of an image of 6 GB.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PAUSE, SPARK = "docker.io/local/pause:1", "docker.io/local/spark:1"
CHECKOUT = Path(__file__).resolve().parents[1]

_PAUSE_SOURCE = """
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int number) { _exit(0); }
static void reap(int number) { while (waitpid(-1, 0, WNOHANG) > 0); }
int main() { signal(SIGTERM, end); signal(SIGINT, end); signal(SIGCHLD, reap); for (;;) pause(); }
"""
# As the entry point of Spark's own image: an executor, or a driver, from the variables that Spark gives its pods.
_ENTRY = r"""#!/bin/bash
set -e
readarray -t options < <(env | grep '^SPARK_JAVA_OPT_' | sort -t_ -k4 -n | sed 's/[^=]*=//')
init=(); [ -x /usr/bin/tini ] && init=(/usr/bin/tini -s --)
case "$1" in
driver)
  shift
  exec "${init[@]}" "$SPARK_HOME/bin/spark-submit" --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" \
    --deploy-mode client "$@" ;;
executor)
  exec "${init[@]}" "$JAVA_HOME/bin/java" "${options[@]}" -Xms"$SPARK_EXECUTOR_MEMORY" -Xmx"$SPARK_EXECUTOR_MEMORY" \
    -cp "$SPARK_CLASSPATH:$SPARK_HOME/conf:$SPARK_HOME/jars/*" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend --driver-url "$SPARK_DRIVER_URL" \
    --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" --app-id "$SPARK_APPLICATION_ID" \
    --hostname "$SPARK_EXECUTOR_POD_IP" --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
    --podName "$SPARK_EXECUTOR_POD_NAME" ;;
*) exec "${init[@]}" "$@" ;;
esac
"""
# What Spark has a pod do before it ends, where it decommissions executors: announce it to the executor, and wait.
_LEAVING = """#!/bin/bash
pid=$(grep -l '^java$' /proc/[0-9]*/comm | head -n 1 | cut -d / -f 3)
kill -s PWR "$pid"
timeout 60 tail --pid="$pid" -f /dev/null
"""
_FOLDERS = (
    "usr",
    "etc",
    "root",
    "tmp",
    "opt",
    "var",
    "var/tmp",
    "opt/spark",
    "opt/spark/work-dir",
    "proc",
    "sys",
    "dev",
    "run",
)


def java_home() -> Path:
    """Return the folder of this machine's Java."""
    java = shutil.which("java")
    home = os.environ.get("JAVA_HOME") or (java and str(Path(java).resolve().parents[1]))
    assert home, "there is no Java"
    return Path(home)


def mounts(role: str) -> dict[str, str]:
    """Return the settings by which the pods of a role ("driver", "executor") see this machine's programs, read-only."""
    # Java's own settings are links from its folder into /etc.
    etc = {str(path.resolve().parent) for path in (java_home() / "conf").glob("*") if path.is_symlink()}
    folders = {"/usr", "/etc/alternatives", sys.base_prefix, sys.prefix, str(CHECKOUT), *etc}
    conf = {}
    outermost = [path for path in folders if not any(path.startswith(f"{other}/") for other in folders)]
    for number, path in enumerate(sorted(outermost)):
        key = f"spark.kubernetes.{role}.volumes.hostPath.v{number}"
        conf |= {f"{key}.mount.path": path, f"{key}.options.path": path, f"{key}.mount.readOnly": "true"}
    return conf


def write(target: Path) -> None:
    """Write both images."""
    from pyspark.find_spark_home import _find_spark_home

    with tempfile.TemporaryDirectory() as folder:
        command = ["gcc", "-static", "-Os", "-s", "-x", "c", "-", "-o", f"{folder}/pause"]
        subprocess.run(command, input=_PAUSE_SOURCE.encode(), check=True)
        pause = Path(folder, "pause").read_bytes()
    links = {name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib64")}
    files = {"opt/entrypoint.sh": _ENTRY.encode(), "opt/decom.sh": _LEAVING.encode()}
    files |= {"etc/passwd": b"root:x:0:0:root:/tmp:/bin/bash\n"}
    home = [f"SPARK_HOME={_find_spark_home()}", f"JAVA_HOME={java_home()}", "HOME=/tmp"]
    env = ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", *home]
    images = {
        PAUSE: (_layer({}, {"pause": pause}), {"Entrypoint": ["/pause"]}),
        SPARK: (
            _layer(links, files, _FOLDERS),
            {"Entrypoint": ["/opt/entrypoint.sh"], "Env": env, "WorkingDir": "/opt/spark/work-dir"},
        ),
    }
    manifest = []
    with tarfile.open(target, "w") as tar:
        for name, (layer, config) in images.items():
            digest = hashlib.sha256(layer).hexdigest()
            about = {"architecture": "amd64", "os": "linux", "config": config, "history": [{"created_by": "tests"}]}
            document = json.dumps({**about, "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}}).encode()
            config_name = f"{hashlib.sha256(document).hexdigest()}.json"
            _add(tar, f"{digest}.tar", layer)
            _add(tar, config_name, document)
            manifest.append({"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}.tar"]})
        _add(tar, "manifest.json", json.dumps(manifest).encode())


def _layer(links: dict[str, str], files: dict[str, bytes], folders: tuple[str, ...] = ()) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in folders:
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name.endswith("tmp") else 0o755
            tar.addfile(info)
        for name, target in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
        for name, data in files.items():
            _add(tar, name, data)
    return out.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o755
    tar.addfile(info, io.BytesIO(data))
