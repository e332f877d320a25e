// The smallest program on an installed Tilewise: equal keys, so that the result is the mean of the values.
#include <cmath>
#include <cstdio>

#include "tilewise/tilewise.hpp"

int main() {
  float q[8] = {1}, k[2 * 8] = {}, v[2 * 8] = {1, 2, 3, 4, 5, 6, 7, 8, 3, 4, 5, 6, 7, 8, 9, 10}, o[8] = {};
  tilewise::forward(tilewise::Problem(),
                    {.q = {q, {1, 1, 1, 8}}, .k = {k, {1, 2, 1, 8}}, .v = {v, {1, 2, 1, 8}}, .o = {o, {1, 1, 1, 8}}});
  std::printf("tilewise %s: %g %g ... %g\n", tilewise::version().c_str(), o[0], o[1], o[7]);
  return std::fabs(o[0] - 2) < 1e-6 && std::fabs(o[7] - 9) < 1e-6 ? 0 : 1;
}
