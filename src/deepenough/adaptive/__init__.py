"""Mechanisms that decide how deep to go; each leaves a `DepthTrace`."""
