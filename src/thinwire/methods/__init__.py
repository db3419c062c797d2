# SPDX-License-Identifier: Apache-2.0
"""The methods of the papers: strategies, codecs, graphs, optimizers, and the means that they are made of."""
