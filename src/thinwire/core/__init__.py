# SPDX-License-Identifier: Apache-2.0
"""What everything else stands on: wires, flat vectors, kernels and files. It knows no method."""
