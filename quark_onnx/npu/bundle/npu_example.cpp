// Open the model of a deployment folder, and say where it runs: npu_example [FOLDER].
#include <iostream>

#include "npu_session.hpp"

int main(int count, char** words) {
  const std::filesystem::path folder = count > 1 ? words[1] : "bundle";
  try {
    Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "npu_example");
    bool on_npu = false;
    [[maybe_unused]] Ort::Session session = npu::open_session(env, folder, on_npu);
    std::cout << "on the " << (on_npu ? "NPU" : "CPU") << "\n";
  } catch (const std::exception& error) {
    std::cerr << "npu_example: " << error.what() << "\n";
    return 1;
  }
}
