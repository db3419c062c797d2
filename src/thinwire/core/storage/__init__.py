# SPDX-License-Identifier: Apache-2.0
"""Files that are written completely or not at all."""
