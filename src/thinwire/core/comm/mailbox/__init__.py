# SPDX-License-Identifier: Apache-2.0
"""Asynchronous point-to-point messages: sent without a matching call, and handled while the receiver trains."""
