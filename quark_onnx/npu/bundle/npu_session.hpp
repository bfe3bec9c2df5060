// Open the model of a deployment folder on the NPU; on the CPU where that is not possible, saying so.
//
//   Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "app");
//   bool on_npu = false;
//   Ort::Session session = npu::open_session(env, folder, on_npu);
//   Ort::Session behind = npu::open_on_cpu(env, folder, npu::options::postprocess, "libortextensions.so");
//
// C++17 and the headers of onnxruntime 1.20 or later; "provider_options.hpp" lies beside this file.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "provider_options.hpp"

namespace npu {

using Options = std::unordered_map<std::string, std::string>;

// Device and revision of all PCI devices of AMD, as upper-case hexadecimal digits.
inline std::vector<std::pair<std::string, std::string>> pci_devices() {
  std::vector<std::pair<std::string, std::string>> found;
#ifdef _WIN32
  std::string text;
  if (FILE* pipe = _popen("pnputil /enum-devices /bus PCI /deviceids", "r")) {
    char part[512];
    while (std::fgets(part, sizeof part, pipe)) text += part;
    _pclose(pipe);
  }
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

// strict: an operator that would run on the CPU is an error.
inline Ort::Session open_session(Ort::Env& env, const std::filesystem::path& folder, bool& on_npu, bool strict = false) {
  const std::filesystem::path model = folder / options::model;
  on_npu = false;
  try {
    const std::string device = detect();
    if (device.empty()) throw std::runtime_error("no Ryzen AI NPU was found");
    const auto known = options::devices.find(device);
    if (known == options::devices.end()) throw std::runtime_error("the model is not for this processor, " + device);
    Options chosen;
    for (const auto& [key, value] : known->second) chosen[key] = filled(value, folder);
    const auto overlay = chosen.find("xclbin");
    if (overlay != chosen.end() && !std::filesystem::exists(overlay->second))
      throw std::runtime_error("there is no overlay " + overlay->second +
                               "; Ryzen AI 1.7.1 installs it: ship a copy, quark-onnx npu deploy --xclbin FILE");
    chosen["cache_key"] = options::cache_key + "_" + device + "_" + OrtGetApiBase()->GetVersionString();
    Ort::SessionOptions session_options;
    if (strict) session_options.AddConfigEntry("session.disable_cpu_ep_fallback", "1");
    session_options.AppendExecutionProvider_VitisAI(chosen);
    Ort::Session session(env, model.c_str(), session_options);
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
