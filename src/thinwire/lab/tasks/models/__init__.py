# SPDX-License-Identifier: Apache-2.0
"""Models of named sizes, whose initial parameters are a function of the size and a seed alone."""
