# SPDX-License-Identifier: Apache-2.0
"""Every kernel in a few operations of torch, as the fallback and the definition that tests compare with."""
