"""Builds every csrc/**/*.pyx; the path below csrc mirrors the import path, so no list is kept here."""

import os
from pathlib import Path

from Cython.Build import cythonize
from Cython.Compiler import Options
from setuptools import Extension, setup

Options.warning_errors = True

# Warnings are errors in our code; the four -Wno are for what Cython itself generates.
C_FLAGS = [
    "-O3",
    "-std=c11",
    "-D_GNU_SOURCE",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unused-function",
    "-Wno-unused-parameter",
    "-Wno-missing-field-initializers",
    "-Wno-cast-function-type",
]

CSRC = Path("csrc")


def extensions() -> list[Extension]:
    return [
        Extension(
            ".".join(path.relative_to(CSRC).with_suffix("").parts),
            [str(path)],
            include_dirs=[str(CSRC / "include")],
            extra_compile_args=C_FLAGS,
        )
        for path in sorted(CSRC.rglob("*.pyx"))
    ]


setup(
    ext_modules=cythonize(
        extensions(),
        build_dir="build/cython",
        include_path=[str(CSRC)],
        nthreads=0 if os.environ.get("VIIWORK_BUILD_SERIAL") else os.cpu_count() or 1,
        compiler_directives={"language_level": 3, "boundscheck": False, "wraparound": False},
    )
)
