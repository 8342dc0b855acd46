"""What trains artifacts on a device, with numpy, onnxruntime and safetensors alone.

- What users hold: `checkpoint` (the state), `module`, `optimizer`, `scheduler`, `train_step`, which
  is a whole step in one graph, and `adapters`, which are exported by themselves.
- What these run by: a `session`, whose values lie in `tensor` memory; `training` and `update` are
  the two halves of a step; `inference` writes a model with the weights of now.
- Files: `checkpoint_file`, `safetensors_file`, `protobuf` without the onnx package. `pickling`
  refuses it to what holds memory and sessions.
"""
