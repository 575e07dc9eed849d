{
  description = "Sparse delta memory, Kimi delta attention and product-key top-k for PyTorch";

  inputs = {
    kernel-builder.url = "github:huggingface/kernels";
  };

  outputs =
    {
      self,
      kernel-builder,
    }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;

      # What tests/ imports besides torch and pytest.
      pythonCheckInputs =
        pkgs: with pkgs; [
          hypothesis
          jinja2
          kernels
          numpy
          pyyaml
        ];
    };
}
