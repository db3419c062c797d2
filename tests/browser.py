# SPDX-License-Identifier: Apache-2.0
"""Where a browser is, and how tests call it."""

from __future__ import annotations

import shutil

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
"""The path of Chromium; empty where there is none."""
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
)
"""Options with which it shows no window and asks no server for anything."""
