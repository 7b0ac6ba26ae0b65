"""Compile the native decoder when the package is built or installed from its sources."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):
    """Adds the compiled library to wheels, which then are for one platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, if there is a compiler; else the package works without."""
        if self.target_name != "wheel":
            return
        path = Path(self.root) / "native" / "build.py"
        spec = importlib.util.spec_from_file_location("native_build", path)
        assert spec is not None and spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            done = build.build()
        except subprocess.CalledProcessError as error:
            done = False
            print(f"The native decoder was not compiled: {error}", file=sys.stderr)
        if not done and os.environ.get("DEEPENOUGH_REQUIRE_NATIVE") == "1":
            raise RuntimeError(
                "DEEPENOUGH_REQUIRE_NATIVE=1, and the native decoder did not compile."
            )
        if done:
            # Called through ctypes, so that any version of Python can load it.
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{system}"
            build_data["artifacts"].append("src/deepenough/decoding/_native.so")
