# SPDX-License-Identifier: Apache-2.0
"""Two-dimensional tensor parallelism: parameters and activations are split over the rows and columns of a mesh."""

from thinwire.tensor2d.attention import MultiheadAttention2D
from thinwire.tensor2d.clipping import clip_gradient_norm_, gradient_norm
from thinwire.tensor2d.collectives import whole_activation
from thinwire.tensor2d.dropout import Dropout2D
from thinwire.tensor2d.embedding import Embedding2D, PositionTable2D
from thinwire.tensor2d.lamb import Lamb2D
from thinwire.tensor2d.linear import Linear2D, TiedHead2D
from thinwire.tensor2d.loss import cross_entropy_2d
from thinwire.tensor2d.mesh import Mesh2D, Mesh3D, Place, mesh_2d, mesh_3d, run_mesh_3d_threads, run_mesh_threads
from thinwire.tensor2d.norms import LayerNorm2D, RMSNorm2D
from thinwire.tensor2d.panels import Panels
from thinwire.tensor2d.parallelize import parallelize_2d
from thinwire.tensor2d.placement import Axis, Placement
from thinwire.tensor2d.products import multiply_ab, multiply_abt, multiply_atb
from thinwire.tensor2d.state import load_whole_, read_safetensors_, whole_state, write_whole
from thinwire.tensor2d.tape import checkpoint_, checkpoint_2d

__all__ = [
    "Axis",
    "Dropout2D",
    "Embedding2D",
    "Lamb2D",
    "LayerNorm2D",
    "Linear2D",
    "Mesh2D",
    "Mesh3D",
    "MultiheadAttention2D",
    "Panels",
    "Place",
    "Placement",
    "PositionTable2D",
    "RMSNorm2D",
    "TiedHead2D",
    "checkpoint_",
    "checkpoint_2d",
    "clip_gradient_norm_",
    "cross_entropy_2d",
    "gradient_norm",
    "load_whole_",
    "mesh_2d",
    "mesh_3d",
    "multiply_ab",
    "multiply_abt",
    "multiply_atb",
    "parallelize_2d",
    "read_safetensors_",
    "run_mesh_3d_threads",
    "run_mesh_threads",
    "whole_activation",
    "whole_state",
    "write_whole",
]
