# The device kernels as the core holds them: cubins made here, and the sources for the JIT.
#
# KVTIER_CUBINS: OFF, ON (all architectures where NVRTC 12.9 is installed, else none), or a list
# such as "80;90", which must then be made. Adds a source to kvtier_core.
set(KVTIER_CUBINS OFF CACHE STRING "Architectures to compile the device kernels for: OFF, ON or a list")
set(KVTIER_CUBIN_ARCHITECTURES 80 86 89 90 100 120)
# What src/device_jit.cpp and the build both give NVRTC.
set(KVTIER_NVRTC_OPTIONS --std=c++20)

set(device_folder ${CMAKE_CURRENT_LIST_DIR})
set(images_folder ${CMAKE_CURRENT_BINARY_DIR}/device_images)
file(MAKE_DIRECTORY ${images_folder})
file(GLOB device_sources CONFIGURE_DEPENDS ${device_folder}/*.cu ${device_folder}/*.h)

set(cubin_architectures)
if(KVTIER_CUBINS)
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${device_folder}/compile.py --version
    RESULT_VARIABLE nvrtc_result OUTPUT_VARIABLE nvrtc_version ERROR_VARIABLE nvrtc_words
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
  if(nvrtc_result EQUAL 0)
    if(KVTIER_CUBINS STREQUAL "ON")
      set(cubin_architectures ${KVTIER_CUBIN_ARCHITECTURES})
    else()
      set(cubin_architectures ${KVTIER_CUBINS})
    endif()
    message(STATUS "Device kernels: cubins by NVRTC ${nvrtc_version} for ${cubin_architectures}")
  elseif(KVTIER_CUBINS STREQUAL "ON")
    message(WARNING "Device kernels: no cubins, they will be compiled at first use: ${nvrtc_words}")
  else()
    message(FATAL_ERROR "Device kernels: no cubins for ${KVTIER_CUBINS}: ${nvrtc_words}")
  endif()
else()
  message(STATUS "Device kernels: no cubins (KVTIER_CUBINS=${KVTIER_CUBINS})")
endif()

set(nvrtc_option_arguments)
set(embedded_options)
foreach(option ${KVTIER_NVRTC_OPTIONS})
  list(APPEND nvrtc_option_arguments --option=${option})
  string(APPEND embedded_options "    \"${option}\",\n")
endforeach()

# One command each, so that the build tool runs them side by side, as many as it runs compilers.
set(cubin_files)
foreach(architecture ${cubin_architectures})
  set(cubin ${images_folder}/sm_${architecture}.cubin)
  add_custom_command(
    OUTPUT ${cubin}
    COMMAND ${Python_EXECUTABLE} ${device_folder}/compile.py --architecture ${architecture}
            --output ${cubin} ${nvrtc_option_arguments} ${device_sources}
    DEPENDS ${device_folder}/compile.py ${device_sources}
    COMMENT "Compiling the device kernels for sm_${architecture}"
    VERBATIM)
  list(APPEND cubin_files ${cubin})
endforeach()

# embedded_images.cpp.in takes the files in by .incbin. A compiled object does not know of them by
# itself, hence OBJECT_DEPENDS.
set(embedded_labels)
set(embedded_symbols)
set(embedded_cubins)
set(embedded_sources)
function(embed symbol file)
  string(APPEND embedded_labels
    "    .balign 16\n    .hidden ${symbol}\n    .hidden ${symbol}_end\n"
    "    .globl ${symbol}\n    .globl ${symbol}_end\n"
    "${symbol}:\n    .incbin \"${file}\"\n${symbol}_end:\n    .byte 0\n")
  string(APPEND embedded_symbols "extern const std::byte ${symbol}[];\nextern const std::byte ${symbol}_end[];\n")
  set(embedded_labels "${embedded_labels}" PARENT_SCOPE)
  set(embedded_symbols "${embedded_symbols}" PARENT_SCOPE)
endfunction()
foreach(architecture ${cubin_architectures})
  set(symbol kvtier_cubin_${architecture})
  embed(${symbol} ${images_folder}/sm_${architecture}.cubin)
  string(APPEND embedded_cubins "    EmbeddedCubin{${architecture}, {${symbol}, ${symbol}_end}},\n")
endforeach()
foreach(source ${device_sources})
  get_filename_component(name ${source} NAME)
  string(MAKE_C_IDENTIFIER kvtier_source_${name} symbol)
  embed(${symbol} ${source})
  string(APPEND embedded_sources "    EmbeddedSource{\"${name}\", {${symbol}, ${symbol}_end}},\n")
endforeach()
list(LENGTH cubin_architectures embedded_cubin_count)
list(LENGTH device_sources embedded_source_count)
list(LENGTH KVTIER_NVRTC_OPTIONS embedded_option_count)
set(embedded_images ${CMAKE_CURRENT_BINARY_DIR}/embedded_images.cpp)
configure_file(${device_folder}/embedded_images.cpp.in ${embedded_images} @ONLY)
set_source_files_properties(${embedded_images} PROPERTIES
  OBJECT_DEPENDS "${cubin_files};${device_sources}")
target_sources(kvtier_core PRIVATE ${embedded_images})
target_include_directories(kvtier_core PRIVATE src)
