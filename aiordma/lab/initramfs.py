"""The initramfs: the guest's first programs, in an archive that the kernel unpacks.

It is built for every run. It has a few megabytes and building takes milliseconds, while a cached
archive could be out of date. It contains a static busybox, kernel modules, and three shell scripts:

    /init               mounts the host's file system below an overlay, and makes it the root
    lab/start           runs in the new root: starts lab/devices, then executes the agent as PID 1
    lab/devices         loads the RDMA modules and creates the devices

`/init` moves `lab` to /run of the new root, where it hides none of the host's files.
"""

import os
import shlex
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .devices import Device, setup_script
from .kernel import Kernel
from .kernel_modules import Module

__all__ = ["CORE_MODULES", "archive", "build", "probe"]

# These modules give access to the host's files and to the channel to the host.
CORE_MODULES = ("virtio_pci", "9p", "9pnet_virtio", "overlay", "virtio_console")
_RDMA_MODULES = ("veth", "rdma_ucm")

_INIT = """\
#!/bin/busybox sh
export PATH=/bin
busybox mkdir -p /proc /sys /dev /lower /upper /new
busybox mount -t proc proc /proc
for module in {modules}; do
    busybox insmod /lab/$module.ko || echo "lab: cannot load module $module"
done
options=trans=virtio,version=9p2000.L,msize=512000,cache=loose,access=any
{mount_root}
busybox mount -t proc proc /new/proc
busybox mount -t sysfs sysfs /new/sys
busybox mount -t devtmpfs devtmpfs /new/dev
busybox mkdir -p /new/dev/pts /new/dev/shm
busybox mount -t devpts -o mode=620,ptmxmode=666 devpts /new/dev/pts
busybox mount -t tmpfs tmpfs /new/dev/shm
busybox mount -t tmpfs -o mode=755 tmpfs /new/run
{mount_cwd}
busybox mv /lab /bin/busybox /new/run/
exec /new/run/busybox switch_root /new /bin/sh /run/lab/start
"""

# The host's root is mounted read-only below an overlay. The working directory is mounted again,
# writable, on top. If the working directory is the root, there is one writable mount.
_MOUNT_OVERLAY = """\
busybox mount -t 9p -o ro,$options root /lower
busybox mount -t tmpfs -o size=90% tmpfs /upper
busybox mkdir /upper/files /upper/work
busybox mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work root /new"""
_MOUNT_CWD = """\
busybox mkdir -p {path}
busybox mount -t 9p -o rw,$options cwd {path}"""
_MOUNT_ALL = "busybox mount -t 9p -o rw,$options cwd /new"

# The file may be the host's own, if the working directory is the root: it is not written to. A
# minimal system has none.
_ADD_HOSTS = """\
[ -e /etc/hosts ] || : >/etc/hosts
{{ /run/busybox cat /etc/hosts; /run/busybox cat <<'END'
{hosts}END
}} >/run/lab/hosts
/run/busybox mount -o bind /run/lab/hosts /etc/hosts
"""

_START = """\
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
if [ ! -e /lib/modules/{release}/modules.dep ]; then
    /run/busybox mkdir -p /lib/modules/{release}
    /run/busybox mount -o bind {module_dir} /lib/modules/{release}
fi
{hosts}
{library_path}
/bin/sh /run/lab/devices </dev/null >/dev/console 2>&1 &
AIORDMA_LAB_DEVICES=$! exec {agent} </dev/null >/dev/console 2>&1
"""

_DEVICES = """\
fail() {{ echo "$1" >/run/lab/failed; exit 1; }}
wait_for() {{
    for attempt in $(/run/busybox seq 500); do
        /run/busybox grep -qs "$1" "$2"/* && return
        /run/busybox usleep 10000
    done
    return 1
}}
card() {{
    for card in /sys/class/net/*; do
        [ "$(/run/busybox cat $card/address)" = "$1" ] && echo "${{card##*/}}"
    done
}}
for module in {modules}; do
    /run/busybox insmod /run/lab/$module.ko || fail "could not load the kernel's module $module"
done
ip link set lo up || fail "could not bring up the loopback interface"
{setup}
"""

_PROBE = """\
#!/bin/busybox sh
/bin/busybox mkdir -p /dev
/bin/busybox mount -t devtmpfs devtmpfs /dev
echo {token} >/dev/ttyS0
/bin/busybox reboot -f
"""


def build(
    kernel: Kernel, devices: Sequence[Device], cwd: str, busybox: Path, hosts: str = ""
) -> bytes:
    """Return an initramfs that creates `devices` and starts the agent, with `cwd` writable.

    `hosts` are lines for /etc/hosts.

    Raises: LabError if the kernel lacks a module.
    """
    core = kernel.load_order(CORE_MODULES)
    checksums = [device.checksum for device in devices if device.checksum in kernel]
    cards = ["virtio_net"] if any(device.mac for device in devices) else []
    wanted = [*cards, *_RDMA_MODULES, *checksums, *(device.module for device in devices)]
    rdma = [m for m in kernel.load_order(wanted) if m not in core]
    init = _INIT.format(modules=_names(core), **_mounts(cwd))
    scripts = {
        "lab/start": _START.format(
            release=kernel.release,
            module_dir=shlex.quote(str(kernel.modules)),
            hosts=_ADD_HOSTS.format(hosts=hosts) if hosts else "",
            library_path=_library_path(),
            agent=_agent_command(),
        ),
        "lab/devices": _DEVICES.format(modules=_names(rdma), setup=setup_script(tuple(devices))),
    }
    files = {"init": (0o755, init.encode()), "bin/busybox": (0o755, busybox.read_bytes())}
    files |= {path: (0o644, text.encode()) for path, text in scripts.items()}
    files |= {f"lab/{m.stem}.ko": (0o644, m.content()) for m in (*core, *rdma)}
    return archive(files, directories=("bin", "lab"))


def probe(token: str, busybox: Path) -> bytes:
    """Return an initramfs that prints `token` on the console and stops the machine."""
    files = {
        "init": (0o755, _PROBE.format(token=token).encode()),
        "bin/busybox": (0o755, busybox.read_bytes()),
    }
    return archive(files, directories=("bin",))


def _mounts(cwd: str) -> dict[str, str]:
    if cwd == "/":
        return {"mount_root": _MOUNT_ALL, "mount_cwd": ""}
    path = shlex.quote(f"/new{cwd}")
    return {"mount_root": _MOUNT_OVERLAY, "mount_cwd": _MOUNT_CWD.format(path=path)}


def _names(modules: Sequence[Module]) -> str:
    return " ".join(module.stem for module in modules)


def _library_path() -> str:
    """Return a line that sets LD_LIBRARY_PATH as on the host: some interpreters need it."""
    path = os.environ.get("LD_LIBRARY_PATH")
    return f"export LD_LIBRARY_PATH={shlex.quote(path)}" if path else ""


def _agent_command() -> str:
    """Return the command that starts the guest's agent with the interpreter that runs the lab.

    In the guest `lab` is a top-level package: importing `aiordma` would load the whole library. The
    path is appended last, so that no module of the library hides a module of Python.
    """
    library = str(Path(__file__).parents[1])
    program = f"import sys; sys.path.append({library!r}); import lab.guest.agent as a; a.main()"
    return shlex.join([str(Path(sys.executable).resolve()), "-ISc", program])


def archive(files: Mapping[str, tuple[int, bytes]], directories: Iterable[str] = ()) -> bytes:
    """Return an archive in "newc" cpio format, the format of an initramfs.

    `files` maps a path to permissions and content. `directories` lists parents before children.
    """
    parts = [_entry(path, stat.S_IFDIR | 0o755, b"") for path in directories]
    parts += [_entry(path, stat.S_IFREG | mode, data) for path, (mode, data) in files.items()]
    parts.append(_entry("TRAILER!!!", 0, b""))
    return b"".join(parts)


def _entry(path: str, mode: int, data: bytes) -> bytes:
    name = path.encode() + b"\0"
    # inode, mode, uid, gid, links, mtime, size, device (2), rdev (2), name length, checksum
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name), 0)
    header = b"070701" + b"".join(b"%08X" % value for value in fields)
    return _aligned(header + name) + _aligned(data)


def _aligned(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
