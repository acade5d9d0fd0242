// The part of TensorFlow's C API that the operations use (tensorflow/c/kernels.h, ops.h, tf_tensor.h, tf_status.h).
//
// It is declared here, so that neither TensorFlow nor its headers are needed to build the library: one binary works with
// TensorFlow 2.15 to 2.21. The symbols are those of the TensorFlow that loads it.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct TF_Status;
struct TF_Tensor;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;

enum TF_Code { TF_OK = 0, TF_INVALID_ARGUMENT = 3 };
enum TF_DataType { TF_FLOAT = 1, TF_UINT8 = 4, TF_INT64 = 9, TF_BOOL = 10 };

TF_Status* TF_NewStatus(void);
void TF_DeleteStatus(TF_Status*);
void TF_SetStatus(TF_Status*, TF_Code, const char* message);
TF_Code TF_GetCode(const TF_Status*);

void* TF_TensorData(const TF_Tensor*);
int64_t TF_TensorElementCount(const TF_Tensor*);
void TF_DeleteTensor(TF_Tensor*);

TF_OpDefinitionBuilder* TF_NewOpDefinitionBuilder(const char* name);
void TF_OpDefinitionBuilderAddAttr(TF_OpDefinitionBuilder*, const char*);
void TF_OpDefinitionBuilderAddInput(TF_OpDefinitionBuilder*, const char*);
void TF_OpDefinitionBuilderAddOutput(TF_OpDefinitionBuilder*, const char*);
void TF_OpDefinitionBuilderSetShapeInferenceFunction(TF_OpDefinitionBuilder*,
                                                     void (*)(TF_ShapeInferenceContext*, TF_Status*));
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder*, TF_Status*);
void TF_ShapeInferenceContextSetUnknownShape(TF_ShapeInferenceContext*, TF_Status*);

TF_KernelBuilder* TF_NewKernelBuilder(const char* op, const char* device, void* (*create)(TF_OpKernelConstruction*),
                                      void (*compute)(void*, TF_OpKernelContext*), void (*destroy)(void*));
void TF_RegisterKernelBuilder(const char* name, TF_KernelBuilder*, TF_Status*);

void TF_OpKernelConstruction_GetAttrInt64(TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*);
void TF_OpKernelConstruction_GetAttrFloat(TF_OpKernelConstruction*, const char*, float*, TF_Status*);
void TF_OpKernelConstruction_GetAttrBool(TF_OpKernelConstruction*, const char*, unsigned char*, TF_Status*);
void TF_OpKernelConstruction_GetAttrSize(TF_OpKernelConstruction*, const char*, int32_t* list_size, int32_t* total_size,
                                         TF_Status*);
void TF_OpKernelConstruction_GetAttrInt64List(TF_OpKernelConstruction*, const char*, int64_t*, int max, TF_Status*);
void TF_OpKernelConstruction_Failure(TF_OpKernelConstruction*, TF_Status*);

void TF_GetInput(TF_OpKernelContext*, int i, TF_Tensor**, TF_Status*);
TF_Tensor* TF_AllocateOutput(TF_OpKernelContext*, int index, TF_DataType, const int64_t* dims, int num_dims, size_t bytes,
                             TF_Status*);
void TF_OpKernelContext_Failure(TF_OpKernelContext*, TF_Status*);
}
