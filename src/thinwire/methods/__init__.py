# SPDX-License-Identifier: Apache-2.0
"""What the papers say: strategies, codecs, graphs, optimizers, and the means that they are made of."""
