"""Compiles the modules that record, where that can be done; all else about the package is in setup.cfg.

Without Cython or a C compiler, or with ``DYNBATCH_PURE=1`` in the environment, the package is what it is without this
file: the same modules, in Python.
"""

from __future__ import annotations

import os
import runpy
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

try:
    from Cython.Build import cythonize
except ImportError:
    cythonize = None

ROOT = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.join(ROOT, "dynbatch")
compiled = runpy.run_path(os.path.join(PACKAGE, "compiled.py"))
DIGEST = compiled["digest"](PACKAGE)

OPTIONS = [] if "CFLAGS" in os.environ else ["-O2", "-g0"]

DIRECTIVES = {
    "language_level": 3,
    "annotation_typing": False,  # C types are in the .pxd files; an annotation is not checked at run time
    "auto_pickle": False,
    "boundscheck": False,
    "initializedcheck": False,
    "wraparound": False,
}


def extensions() -> list[Extension]:
    """The modules as C, made anew where a source is newer or differs from what was compiled."""
    for line in set(DIGEST.splitlines()) - set(compiled["built_from"](PACKAGE).splitlines()):
        os.utime(os.path.join(PACKAGE, line.split()[1]))  # a checkout of an older version may have older files
    found = []
    for module in compiled["MODULES"]:
        source = os.path.join("dynbatch", *module.split("."))
        suffix = ".pyx" if os.path.exists(os.path.join(ROOT, source + ".pyx")) else ".py"
        found.append(Extension(f"dynbatch.{module}", [source + suffix], extra_compile_args=OPTIONS))
    folder = os.path.join("build", "cython")
    return cythonize(found, build_dir=folder, compiler_directives=DIRECTIVES, nthreads=os.cpu_count())


class BuildAll(build_ext):
    """All modules or none: compiled ones know one another's C types."""

    def run(self) -> None:
        """Build, and leave the digest of the sources beside what was built."""
        self.parallel = self.parallel or os.cpu_count()
        places = [os.path.join(self.build_lib, "dynbatch")] + [PACKAGE] * bool(self.inplace)
        stamps = [os.path.join(place, compiled["STAMP"]) for place in places]
        for stamp in stamps:
            if os.path.exists(stamp):
                os.remove(stamp)
        try:
            super().run()
        except (BaseError, CCompilerError) as error:
            print(f"dynbatch is installed uncompiled, and will record more slowly: {error}", file=sys.stderr)
            for extension in self.extensions:
                built = os.path.join(self.build_lib, self.get_ext_filename(extension.name))
                if os.path.exists(built):
                    os.remove(built)
            self.extensions = []
            return
        for stamp in stamps:
            os.makedirs(os.path.dirname(stamp), exist_ok=True)
            with open(stamp, "w", encoding="utf-8") as file:
                file.write(DIGEST)


if os.environ.get("DYNBATCH_PURE", "").lower() in ("1", "true", "yes", "on"):
    setup()
elif cythonize is None:
    print("dynbatch is installed uncompiled, and will record more slowly: there is no Cython", file=sys.stderr)
    setup()
else:
    setup(ext_modules=extensions(), cmdclass={"build_ext": BuildAll})
