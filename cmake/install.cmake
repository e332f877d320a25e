# `cmake --install`: library, headers, find_package(Tilewise), pkg-config.
include(CMakePackageConfigHelpers)
install(TARGETS tilewise EXPORT TilewiseTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/tilewise DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET tilewise_cli)
  install(TARGETS tilewise_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Tilewise)
install(EXPORT TilewiseTargets NAMESPACE Tilewise:: DESTINATION ${package_dir})
configure_package_config_file(cmake/TilewiseConfig.cmake.in ${PROJECT_BINARY_DIR}/TilewiseConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/TilewiseConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/TilewiseConfig.cmake ${PROJECT_BINARY_DIR}/TilewiseConfigVersion.cmake
        DESTINATION ${package_dir})
# Relative to the .pc file, so that `cmake --install --prefix` elsewhere stays right.
file(RELATIVE_PATH pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/tilewise.pc.in ${PROJECT_BINARY_DIR}/tilewise.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/tilewise.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
