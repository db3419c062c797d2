# SPDX-License-Identifier: Apache-2.0
"""thin-gpt: an open benchmark of training over slow links. README.md has three commands, RULES.md the frozen rules."""

VERSION = "thin-gpt/1"
