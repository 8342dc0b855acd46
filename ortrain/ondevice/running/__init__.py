"""What artifacts run by, with numpy, onnxruntime and safetensors alone."""
