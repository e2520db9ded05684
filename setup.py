"""The native library's step of the build; everything else is in pyproject.toml.

With ROPECHECK_CUDA=auto, the default, the library is built where nvcc, a host compiler and torch's headers are found;
``require`` fails where none comes out, and ``off`` leaves it out.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.errors import BaseError

ROOT = Path(__file__).parent


def _native_build() -> ModuleType:
    """kernels/native_build.py: importing the package would need torch."""
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "kernels" / "native_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


NATIVE_BUILD = _native_build()
try:
    MODE = NATIVE_BUILD.build_mode()
except ValueError as error:
    sys.exit(f"error: {error}")


class BuildNative(Command):
    """Put the native library beside the package's modules: in the build folder, or in the sources if editable."""

    description = "build the native library"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        self.editable_mode = False
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    @property
    def library(self) -> Path:
        assert self.build_lib is not None
        return Path(self.build_lib) / "ropecheck" / "kernels" / NATIVE_BUILD.LIBRARY_NAME

    @property
    def _beside_sources(self) -> Path:
        return ROOT / "kernels" / NATIVE_BUILD.LIBRARY_NAME

    def run(self) -> None:
        target = self._beside_sources if self.editable_mode else self.library
        try:
            print(f"ropecheck: {NATIVE_BUILD.provide_library(target, MODE)}", file=sys.stderr)
        except NATIVE_BUILD.CannotBuild as error:
            raise BaseError(str(error)) from error

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(ROOT)) for path in sorted(NATIVE_BUILD.SOURCES.iterdir()) if path.is_file()]

    def get_outputs(self) -> list[str]:
        return [str(self.library)] if self.library.exists() else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    """Also builds the native library."""

    sub_commands = [*build.sub_commands, ("build_native", None)]  # noqa: RUF012


class Wheel(bdist_wheel):
    """With a native library the wheel is for one platform, and for every Python on it."""

    @property
    def _has_library(self) -> bool:
        return bool(self.get_finalized_command("build_native").get_outputs())

    def get_tag(self) -> tuple[str, str, str]:
        if not self._has_library:
            return super().get_tag()
        pure, self.root_is_pure = self.root_is_pure, False
        _, _, platform = super().get_tag()
        self.root_is_pure = pure
        return ("py3", "none", platform)

    def write_wheelfile(self, *arguments: str) -> None:
        # Until here the wheel was pure, so that everything was laid out at its root.
        self.root_is_pure = not self._has_library
        super().write_wheelfile(*arguments)


setup(cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": Wheel})
