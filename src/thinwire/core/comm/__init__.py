# SPDX-License-Identifier: Apache-2.0
"""Communication between ranks: collectives, point-to-point messages, and a count of the bytes sent."""
