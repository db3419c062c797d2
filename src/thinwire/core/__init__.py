# SPDX-License-Identifier: Apache-2.0
"""The base of all other packages: wires, flat vectors, kernels and files. It knows no method."""
