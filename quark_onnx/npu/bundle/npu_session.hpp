// Open the model of a deployment folder on the NPU; on the CPU where that is not possible, saying so.
//
//   Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "app");
//   bool on_npu = false;
//   Ort::Session session = npu::open_session(env, folder, on_npu);
//   Ort::Session behind = npu::open_on_cpu(env, folder, npu::options::postprocess, "libortextensions.so");
//
// Several bundles in one program: this header of one of them, and the options of the others under names of their own:
//
//   #define NPU_BUNDLE detector
//   #include "detector/provider_options.hpp"
//   Ort::Session detector = npu::open_session<npu::detector>(env, "detector", on_npu);
//
// Open the largest model first (amd/RyzenAI-SW#336), and compare outputs while all of them run: with 1.5 later sessions
// crashed (#223), with 1.8 results became NaN (#402).
//
// Windows ML: define NPU_WINDOWS_ML, with the headers of Microsoft.Windows.AI.MachineLearning and C++20. The provider is
// found, downloaded if necessary, and registered by its catalog (documentation of Ryzen AI 1.8, winml/winml_ep.rst).
//
// C++17 and the headers of onnxruntime 1.20 or later; "provider_options.hpp" lies beside this file.
#pragma once

#ifdef NPU_WINDOWS_ML
#include <winrt/Microsoft.Windows.AI.MachineLearning.h>

#include <win_onnxruntime_cxx_api.h>
#else
#include <onnxruntime_cxx_api.h>
#endif

#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#ifndef _WIN32
#include <sys/utsname.h>
#endif

#include "provider_options.hpp"

namespace npu {

using Options = std::unordered_map<std::string, std::string>;

// What a command prints, which is empty where it cannot be run.
inline std::string printed([[maybe_unused]] const char* command) {
  std::string text;
#ifdef _WIN32
  if (FILE* pipe = _popen(command, "r")) {
    char part[512];
    while (std::fgets(part, sizeof part, pipe)) text += part;
    _pclose(pipe);
  }
#endif
  return text;
}

// Device and revision of all PCI devices of AMD, as upper-case hexadecimal digits.
inline std::vector<std::pair<std::string, std::string>> pci_devices() {
  std::vector<std::pair<std::string, std::string>> found;
#ifdef _WIN32
  const std::string text = printed("pnputil /enum-devices /bus PCI /deviceids");
  const std::string vendor = "VEN_1022&DEV_";
  for (std::size_t at = text.find(vendor); at != std::string::npos; at = text.find(vendor, at + 1)) {
    const std::size_t line = text.find('\n', at), revision = text.find("REV_", at);
    if (revision < line) found.emplace_back(text.substr(at + vendor.size(), 4), text.substr(revision + 4, 2));
  }
#else
  const auto upper = [](std::string digits) {
    for (char& each : digits) each = static_cast<char>(std::toupper(static_cast<unsigned char>(each)));
    return digits;
  };
  const auto read = [](const std::filesystem::path& path) {
    std::ifstream file(path);
    std::string text;
    file >> text;
    return text;
  };
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/bus/pci/devices", missing)) {
    const std::string device = read(entry.path() / "device"), revision = read(entry.path() / "revision");
    if (read(entry.path() / "vendor") == "0x1022" && device.size() > 2 && revision.size() > 2)
      found.emplace_back(upper(device.substr(2)), upper(revision.substr(2)));
  }
#endif
  return found;
}

// "phx", "stx" or "krk"; empty if there is no NPU.
inline std::string detect() {
  for (const auto& [device, revision] : pci_devices()) {
    if (device == "1502" && revision == "00") return "phx";
    if (device == "17F0" && revision == "20") return "krk";
    if (device == "17F0" && (revision == "00" || revision == "10" || revision == "11")) return "stx";
  }
  return {};
}

// The version of the driver of the NPU; "unknown" where the system does not tell it.
inline std::string driver_version() {
  std::string text;
#ifdef _WIN32
  text = printed(
      "powershell -NoProfile -Command \"Get-CimInstance Win32_PnPSignedDriver | Where-Object { $_.DeviceID -match"
      " 'VEN_1022&DEV_(1502|17F0)' } | Select-Object -First 1 -ExpandProperty DriverVersion\"");
#else
  std::ifstream("/sys/module/amdxdna/version") >> text;
  utsname kernel;  // a driver of the kernel itself has the version of the kernel
  if (text.empty() && uname(&kernel) == 0) text = kernel.release;
#endif
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.pop_back();
  return text.empty() ? "unknown" : text;
}

// The numbers of a version, to compare it with another one.
inline std::vector<int> numbers(const std::string& version) {
  std::vector<int> found;
  std::istringstream text(version);
  for (std::string part; std::getline(text, part, '.');) found.push_back(std::atoi(part.c_str()));
  return found;
}

// A number that stands for the content of a file: FNV-1a.
inline std::string digest(const std::string& path) {
  std::uint64_t sum = 14695981039346656037u;
  std::ifstream file(path, std::ios::binary);
  for (char byte; file.get(byte);) sum = (sum ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  return std::to_string(sum);
}

// The model that precompile.py has made for this processor, engine and driver; empty where there is none.
inline std::filesystem::path compiled_model(const std::filesystem::path& folder, const std::string& device,
                                            const std::string& cache_key) {
  const std::filesystem::path compiled = folder / "compiled";
  if (!std::filesystem::exists(compiled / (device + ".onnx"))) return {};
  std::ifstream file(compiled / (device + ".json"));
  std::stringstream record;
  record << file.rdbuf();
  // The key has letters, digits and underscores, which JSON does not escape.
  if (record.str().find('"' + cache_key + '"') != std::string::npos) return compiled / (device + ".onnx");
  std::cerr << "npu_session: " << device
            << ".onnx was compiled with another engine, driver or model and is not used; run precompile.py again\n";
  return {};
}

// The folder of caches, to which the user may write; the variable NPU_CACHE names another.
inline std::string cache_folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::filesystem::path(value ? value : "");
  };
  if (const auto named = variable("NPU_CACHE"); !named.empty()) return named.string();
#ifdef _WIN32
  const auto base = variable("LOCALAPPDATA");
#else
  auto base = variable("XDG_CACHE_HOME");
  if (base.empty()) base = variable("HOME") / ".cache";
#endif
  return (base / "npu_bundles").string();
}

// A value of an option, with the folder and variables of the environment put in.
inline std::string filled(std::string value, const std::filesystem::path& folder) {
  const std::string mark = "{folder}";
  for (std::size_t at = value.find(mark); at != std::string::npos; at = value.find(mark))
    value.replace(at, mark.size(), folder.string());
  const std::string cache = "{cache}";
  for (std::size_t at = value.find(cache); at != std::string::npos; at = value.find(cache))
    value.replace(at, cache.size(), cache_folder());
  for (std::size_t at = value.find("{env:"); at != std::string::npos; at = value.find("{env:")) {
    const std::size_t end = value.find('}', at);
    const std::string name = value.substr(at + 5, end - at - 5);
    const char* known = std::getenv(name.c_str());
    if (!known) throw std::runtime_error("the environment variable " + name + " is not set; install Ryzen AI");
    value.replace(at, end - at + 1, known);
  }
  return value;
}

// Add the provider to a session: that of onnxruntime, or the one that Windows ML registers.
inline void append_provider([[maybe_unused]] Ort::Env& env, Ort::SessionOptions& session_options, const Options& chosen) {
#ifdef NPU_WINDOWS_ML
  using winrt::Microsoft::Windows::AI::MachineLearning::ExecutionProviderCatalog;
  ExecutionProviderCatalog::GetDefault().EnsureAndRegisterCertifiedAsync().get();
  Ort::KeyValuePairs pairs;
  for (const auto& [key, value] : chosen) pairs.Add(key.c_str(), value.c_str());
  for (const Ort::ConstEpDevice& device : env.GetEpDevices()) {
    const bool is_npu = device.HardwareDevice().Type() == OrtHardwareDeviceType_NPU;
    if (!is_npu || std::string(device.EpName()) != "VitisAIExecutionProvider") continue;
    session_options.AppendExecutionProvider_V2(env, {device}, pairs);
    return;
  }
  throw std::runtime_error("Windows ML has no VitisAIExecutionProvider for this machine");
#else
  session_options.AppendExecutionProvider_VitisAI(chosen);
#endif
}

// strict: an operator that would run on the CPU is an error.
template <class Bundle = options>
Ort::Session open_session(Ort::Env& env, const std::filesystem::path& folder, bool& on_npu, bool strict = false) {
  const std::filesystem::path model = folder / Bundle::model;
  on_npu = false;
  try {
    const std::string device = detect();
    if (device.empty()) throw std::runtime_error("no Ryzen AI NPU was found");
    const auto known = Bundle::devices.find(device);
    if (known == Bundle::devices.end()) throw std::runtime_error("the model is not for this processor, " + device);
    Options chosen;
    for (const auto& [key, value] : known->second) chosen[key] = filled(value, folder);
    const auto overlay = chosen.find("xclbin");
    if (overlay != chosen.end() && !std::filesystem::exists(overlay->second))
      throw std::runtime_error("there is no overlay " + overlay->second +
                               "; Ryzen AI 1.7.1 installs it: ship a copy, quark-onnx npu deploy --xclbin FILE");
    const std::string driver = driver_version();
#ifdef _WIN32
    if (driver != "unknown" && numbers(driver) < numbers(Bundle::least_driver))
      throw std::runtime_error("the driver of the NPU is " + driver + ", and " + Bundle::least_driver + " or later is needed");
#endif
    std::string version = device + "_" + OrtGetApiBase()->GetVersionString() + "_" + driver;
    if (overlay != chosen.end()) version += "_" + digest(overlay->second);
    // A folder on each system.
    for (char& letter : version)
      if (!std::isalnum(static_cast<unsigned char>(letter))) letter = '_';
    chosen["cache_key"] = Bundle::cache_key + "_" + version;
    Ort::SessionOptions session_options;
    if (strict) session_options.AddConfigEntry("session.disable_cpu_ep_fallback", "1");
    append_provider(env, session_options, chosen);
    // The key of Phoenix has the content of its overlay, which Python and C++ sum up in different ways.
    const auto compiled =
        overlay == chosen.end() ? compiled_model(folder, device, chosen["cache_key"]) : std::filesystem::path();
    Ort::Session session(env, (compiled.empty() ? model : compiled).c_str(), session_options);
    on_npu = true;
    return session;
  } catch (const std::exception& error) {
    std::cerr << "npu_session: running on the CPU: " << error.what() << "\n";
  }
  return Ort::Session(env, model.c_str(), Ort::SessionOptions());
}

// What stands in front of the model or behind it: options::preprocess, which makes its input of the bytes of an image
// ("encoded"), and options::postprocess, which reads its outputs by their names. Both are empty where there is no such
// thing. extensions: the library of onnxruntime-extensions, for a model with operators of these.
inline Ort::Session open_on_cpu(Ort::Env& env, const std::filesystem::path& folder, const std::string& name,
                                const std::filesystem::path& extensions = {}) {
  if (name.empty()) throw std::runtime_error("the folder has no such model: nothing stands there");
  Ort::SessionOptions session_options;
  if (!extensions.empty()) session_options.RegisterCustomOpsLibrary(extensions.c_str());
  return Ort::Session(env, (folder / name).c_str(), session_options);
}

}  // namespace npu
