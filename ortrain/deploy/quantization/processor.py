"""``Processor``: what is known of the processor that a quantized model runs on."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass

from ortrain.cpuinfo import cpuinfo

_X86 = {"x86_64", "amd64", "i386", "i686"}


@dataclass(frozen=True)
class Processor:
    """A processor, as far as it matters for quantized kernels.

    Attributes:
        machine: its architecture, as ``platform.machine()`` has it.
        flags: of its instructions, as Linux names them; empty where they are not known.
    """

    machine: str
    flags: frozenset[str] = frozenset()

    @classmethod
    def host(cls) -> Processor:
        """The one that runs this."""
        return cls(platform.machine(), _flags())

    @property
    def preset(self) -> str:
        """The name of the configuration that is for it.

        Without VNNI, ``avx2`` is taken also where there is AVX-512: its unsigned weights cannot
        overflow, while signed ones would there. Where nothing is known it is taken as well, as it
        is right everywhere.
        """
        machine = self.machine.lower()
        if machine in {"arm64", "aarch64"}:
            return "arm64"
        if machine in {"ppc64le", "powerpc64le"}:
            return "ppc64le"
        if machine in _X86 and self.flags & {"avx512_vnni", "avx_vnni"}:
            return "avx512_vnni"
        return "avx2"


def _flags() -> frozenset[str]:
    if platform.system() == "Darwin":
        try:
            command = ["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"]
            text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        except OSError:
            return frozenset()
        return frozenset(word.lower().replace("avx512vnni", "avx512_vnni") for word in text.split())
    known = cpuinfo()
    return frozenset((known.get("flags") or known.get("Features") or "").split())
