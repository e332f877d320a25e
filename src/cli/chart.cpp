#include "cli/chart.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

namespace tilewise::cli {
namespace {

constexpr double kWidth = 960, kHeight = 540, kLeft = 92, kRight = 772, kTop = 104, kBottom = 462;
constexpr const char* kInk = "#222222";
constexpr const char* kGrey = "#6b6b6b";

std::string bytes_label(double bytes) {  // three digits: "258 MiB", "64.2 GiB"
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1024;
  return fmt::format("{:.{}f} {}", bytes,
                     bytes >= 99.95 || bytes == std::floor(bytes) ? 0
                     : bytes >= 9.995                             ? 1
                                                                  : 2,
                     kUnits[unit]);
}

std::string length_label(double n) {
  const auto length = static_cast<int64_t>(n);
  if (length >= 1 << 20 && length % (1 << 20) == 0) return fmt::format("{}M", length >> 20);
  if (length >= 1024 && length % 1024 == 0) return fmt::format("{}k", length >> 10);
  return fmt::format("{}", length);
}

std::string words(double x, double y, double size, const char* colour, const char* anchor, const std::string& text,
                  const char* more = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"{}\" fill=\"{}\" text-anchor=\"{}\"{}>{}</text>\n", x,
                     y, size, colour, anchor, more, escaped(text));
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text)
    out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '"' ? "&quot;" : std::string(1, c);
  return out;
}

std::string Chart::svg() const {
  double x_low = HUGE_VAL, x_high = 0, y_low = HUGE_VAL, y_high = 0;
  for (const Series& line : series)
    for (size_t n = 0; n < line.x.size(); ++n) {
      x_low = std::min(x_low, line.x[n]), x_high = std::max(x_high, line.x[n]);
      y_low = std::min(y_low, line.y[n]), y_high = std::max(y_high, line.y[n]);
    }
  if (limit > 0) y_low = std::min(y_low, limit), y_high = std::max(y_high, limit);
  if (x_high <= x_low) x_low /= 2, x_high *= 2;
  // Whole powers of 4 above and below.
  const double bottom = std::floor(std::log2(y_low) / 2) * 2,
               top = std::max(std::ceil(std::log2(y_high) / 2) * 2, bottom + 2);
  const auto at_x = [&](double x) {
    return kLeft + (kRight - kLeft) * (std::log2(x) - std::log2(x_low)) / (std::log2(x_high) - std::log2(x_low));
  };
  const auto at_y = [&](double y) { return kBottom - (kBottom - kTop) * (std::log2(y) - bottom) / (top - bottom); };

  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" role=\"img\" "
      "font-family=\"Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\">\n<title>{2}</title>\n<rect "
      "width=\"{0}\" height=\"{1}\" fill=\"#ffffff\"/>\n",
      kWidth, kHeight, escaped(title));
  out += words(kLeft - 56, 44, 23, kInk, "start", title, " font-weight=\"700\"");
  out += words(kLeft - 56, 70, 15, kGrey, "start", subtitle);

  const double y_step = 2 * std::max(1.0, std::ceil((top - bottom) / 2 / 8));
  for (double power = bottom; power <= top; power += y_step) {
    const double y = at_y(std::exp2(power));
    out += fmt::format("<line x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#e6e6e6\"/>\n", kLeft, kRight, y,
                       y);
    out += words(kLeft - 12, y + 5, 14, kGrey, "end", bytes_label(std::exp2(power)));
  }
  std::vector<double> marks;
  for (const Series& line : series) marks.insert(marks.end(), line.x.begin(), line.x.end());
  std::sort(marks.begin(), marks.end());
  marks.erase(std::unique(marks.begin(), marks.end()), marks.end());
  const size_t every = (marks.size() + 8) / 9;  // at most 9 labels fit side by side
  for (size_t n = (marks.size() - 1) % every; n < marks.size(); n += every) {
    const double x = at_x(marks[n]);
    out += fmt::format("<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\" stroke=\"#999999\"/>\n", x, kBottom,
                       kBottom + 6);
    out += words(x, kBottom + 24, 14, kGrey, "middle", length_label(marks[n]));
  }
  out +=
      fmt::format("<line x1=\"{0}\" x2=\"{1}\" y1=\"{2}\" y2=\"{2}\" stroke=\"#999999\"/>\n", kLeft, kRight, kBottom);
  out += words((kLeft + kRight) / 2, kBottom + 54, 15, kInk, "middle", x_label);

  if (limit > 0) {
    const double y = at_y(limit);
    out +=
        fmt::format("<line x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" stroke-dasharray=\"3 4\"/>\n",
                    kLeft, kRight, y, y, kGrey);
    out += words(kLeft + 8, y - 8, 14, kGrey, "start", limit_name);
  }
  // Names at the right ends, pushed apart where lines end close together.
  struct Label {
    double y;
    const Series* line;
  };
  std::vector<Label> labels;
  for (const Series& line : series) {
    if (line.x.empty()) continue;
    std::string points;
    for (size_t n = 0; n < line.x.size(); ++n)
      points += fmt::format("{}{:.1f},{:.1f}", n ? " " : "", at_x(line.x[n]), at_y(line.y[n]));
    out += fmt::format(
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"3\" stroke-linejoin=\"round\" "
        "stroke-linecap=\"round\"{}/>\n",
        points, line.colour, line.dashed ? " stroke-dasharray=\"8 7\"" : "");
    for (size_t n = 0; n < line.x.size(); ++n)
      out += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4.2\" fill=\"{}\"/>\n", at_x(line.x[n]),
                         at_y(line.y[n]), line.colour);
    labels.push_back({at_y(line.y.back()), &line});
  }
  std::sort(labels.begin(), labels.end(), [](const Label& a, const Label& b) { return a.y < b.y; });
  constexpr double kGap = 44;
  for (size_t n = 1; n < labels.size(); ++n) labels[n].y = std::max(labels[n].y, labels[n - 1].y + kGap);
  for (size_t n = labels.size(); n-- > 0;) {
    const double most = n + 1 < labels.size() ? labels[n + 1].y - kGap : kBottom;
    labels[n].y = std::min(labels[n].y, most);
  }
  for (const Label& label : labels) {
    out += words(kRight + 16, label.y - 3, 15, label.line->colour.c_str(), "start", label.line->name,
                 " font-weight=\"700\"");
    out += words(kRight + 16, label.y + 15, 15, label.line->colour.c_str(), "start", bytes_label(label.line->y.back()));
  }
  return out + "</svg>\n";
}

}  // namespace tilewise::cli
