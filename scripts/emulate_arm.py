"""Checks the Arm kernels without an Arm machine. Needs Linux and two pip packages: ``ziglang`` and ``unicorn``.

Compiles the extension's sources for Arm (all but the bindings, which want Python's headers), then runs every kernel of
the sets ``portable`` and ``neon`` on an emulated processor, and ``portable`` on this machine: all must write the same
bytes. A processor without the dot product instructions must refuse ``neon`` and run ``portable``. Nothing is timed: an
emulator says nothing of speed.

Usage: python scripts/emulate_arm.py
"""

from __future__ import annotations

import ctypes
import platform
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from unicorn import UC_ARCH_ARM64, UC_MODE_ARM, Uc, UcError
from unicorn import arm64_const as arm

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
ARM = ["-target", "aarch64-linux-gnu", "-DOUTRIDER_NEON"]
FORMATS = ("f32", "bf16", "int8", "q8_0", "q4_0", "q4_1")
CASES = (
    *(f"linear {f}" for f in FORMATS),
    "extreme sums",
    "quantize",
    "norm, silu_mul, rotate",
    *(f"attention {f}" for f in ("f32", "f16", "bf16", "int8")),
)
OUT_BYTES = 32 << 20
OUT, STACK, RETURN = 0x4000_0000, 0x5000_0000, 0x6000_0000  # far from the image


def zig(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "ziglang", *map(str, arguments)], check=True)


def from_cmake(pattern: str) -> list[str]:
    """What CMakeLists.txt says, so that this script compiles what the build compiles."""
    found = re.search(pattern, (NATIVE / "CMakeLists.txt").read_text())
    assert found, f"CMakeLists.txt no longer has {pattern}"
    return found[1].split()


def build(folder: Path) -> tuple[Path, Path]:
    """An image for Arm and a library for this machine, both with ``run_case``."""
    flags = ["-std=c++17", *from_cmake(r"PRIVATE (-O3 .*)\)"), "-Werror", "-fno-sanitize=all", "-fno-stack-protector"]
    sources = [NATIVE / s for s in from_cmake(r"_native NOMINSIZE bindings\.cpp (.*)\)")]
    for source in sources:
        print(f"compiling {source.name} for Arm", flush=True)
        zig("c++", *ARM, *flags, "-O1", "-c", source, "-o", folder / "unused.o")
    march = from_cmake(r"set\(dot_product -march=(.*)\)")[0]
    dot_product = "-mcpu=generic+" + march.replace("armv8.2-a", "v8_2a")  # zig's spelling
    neon, portable = NATIVE / "kernels_neon.cpp", NATIVE / "kernels_portable.cpp"
    cases = ROOT / "scripts" / "emulate_arm.cpp"
    image, library = folder / "arm", folder / "here.so"
    own = ["-ffreestanding", "-fno-builtin"]
    for name, source, options in (
        ("neon", neon, [*ARM, dot_product]),
        ("portable", portable, ARM),
        ("cases", cases, [*ARM, *own]),
        ("portable-here", portable, ["-fPIC"]),
        ("cases-here", cases, ["-fPIC", *own]),
    ):
        print(f"compiling {name}", flush=True)
        target = [] if "-target" in options else ["-target", f"{platform.machine()}-linux-gnu"]
        zig("c++", *target, *flags, *options, "-c", source, "-o", folder / f"{name}.o")
    objects = [folder / f"{name}.o" for name in ("cases", "neon", "portable")]
    zig("ld.lld", "-static", "-e", "run_case", "-o", image, *objects)
    zig("ld.lld", "-shared", "-o", library, folder / "cases-here.o", folder / "portable-here.o")
    return image, library


class Processor:
    """An emulated processor with the image in its memory."""

    def __init__(self, image: bytes, model: int) -> None:
        self.uc = Uc(UC_ARCH_ARM64, UC_MODE_ARM)
        self.uc.ctl_set_cpu_model(model)
        self.entry, headers = struct.unpack_from("<QQ", image, 24)  # an ELF file
        size, count = struct.unpack_from("<HH", image, 54)
        loads = [struct.unpack_from("<IIQQQQQ", image, headers + i * size) for i in range(count)]
        loads = [header for header in loads if header[0] == 1]  # PT_LOAD
        low = min(h[3] for h in loads) & -4096
        self.uc.mem_map(low, (max(h[3] + h[6] for h in loads) - low + 4095) & -4096)
        for _, _, offset, address, _, file_bytes, _ in loads:
            self.uc.mem_write(address, image[offset : offset + file_bytes])
        for address, length in ((OUT, OUT_BYTES), (STACK, 1 << 20), (RETURN, 4096)):
            self.uc.mem_map(address, length)
        self.uc.reg_write(arm.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # floating point is on

    def run(self, case: int, neon: bool) -> bytes:
        registers = (arm.UC_ARM64_REG_X0, arm.UC_ARM64_REG_X1, arm.UC_ARM64_REG_X2)
        for register, value in zip(registers, (case, int(neon), OUT), strict=True):
            self.uc.reg_write(register, value)
        self.uc.reg_write(arm.UC_ARM64_REG_SP, STACK + (1 << 20))
        self.uc.reg_write(arm.UC_ARM64_REG_LR, RETURN)
        self.uc.emu_start(self.entry, RETURN)
        return bytes(self.uc.mem_read(OUT, self.uc.reg_read(arm.UC_ARM64_REG_X0)))


def refuses(processor: Processor, case: int) -> bool:
    try:
        processor.run(case, neon=True)
    except UcError:
        return True
    return False


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        image, library = build(Path(folder))
        run_case = ctypes.CDLL(str(library)).run_case
        run_case.restype = ctypes.c_int64
        out = ctypes.create_string_buffer(OUT_BYTES)

        def here(case: int) -> bytes:
            return ctypes.string_at(out, run_case(case, 0, out))

        processor = Processor(image.read_bytes(), arm.UC_CPU_ARM64_MAX)
        old = Processor(image.read_bytes(), arm.UC_CPU_ARM64_A72)
        wrong = 0
        for number, name in enumerate(CASES):
            expected = here(number)
            got = {kernels: processor.run(number, kernels == "neon") for kernels in ("portable", "neon")}
            for kernels, data in got.items():
                at = next((i for i, (a, b) in enumerate(zip(data, expected, strict=False)) if a != b), len(expected))
                same = data == expected and at > 0
                wrong += not same
                print(f"{name:24} {kernels:9} {len(data):8} bytes", "same" if same else f"differ at {at}", flush=True)
        int8 = CASES.index("linear int8")
        old_runs_portable = old.run(int8, neon=False) == here(int8)
        for text, good in (
            ("without dot products neon stops", refuses(old, int8)),
            ("without dot products portable runs", old_runs_portable),
        ):
            wrong += not good
            print(f"{text:43}", "yes" if good else "NO")
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
