# SPDX-License-Identifier: Apache-2.0
"""Strategies whose workers go at their own pace, and the quorum that one of them decides by."""
