// A log-log line chart as SVG text: a few series, named at their right ends, a value or a limit marked where asked.
#pragma once
#include <string>
#include <vector>

namespace tilewise::cli {

std::string escaped(const std::string& text);  // for XML and HTML

struct Series {
  std::string name;
  std::string colour;
  std::vector<double> x, y;  // above 0, x ascending
  bool dashed = false;
};

struct Chart {
  std::string title, subtitle, x_label;
  std::vector<Series> series;
  double limit = 0;  // > 0: a horizontal line, in bytes
  std::string limit_name;

  std::string svg() const;  // y in bytes, labelled in KiB, MiB, ...
};

}  // namespace tilewise::cli
