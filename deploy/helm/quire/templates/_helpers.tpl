{{- define "quire.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* Of the pods that an InferencePool may send requests to. */ -}}
{{- define "quire.endpointLabels" -}}
inference-pool: {{ include "quire.name" . }}
{{- end -}}

{{- define "quire.selector" -}}
app.kubernetes.io/name: quire
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "quire.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* Longer than requests get, by what a process takes to end. */ -}}
{{- define "quire.gracePeriod" -}}
{{ add (.Values.settings.QUIRE_SHUTDOWN_DELAY_SECONDS | default 5) (.Values.settings.QUIRE_DRAIN_SECONDS | default 30) 25 }}
{{- end -}}

{{- /* "" where files and adapters are in object storage. */ -}}
{{- define "quire.storageClaim" -}}
{{- if .Values.storage.existingClaim -}}
{{ .Values.storage.existingClaim }}
{{- else if .Values.storage.size -}}
{{ include "quire.name" . }}-storage
{{- end -}}
{{- end -}}

{{- /* What every container gets: Kubernetes' "restricted" profile, and a root file system that can't be written. */ -}}
{{- define "quire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "quire.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "quire.environment" -}}
env:
  - {name: QUIRE_DATA_DIR, value: /var/lib/quire}
  - {name: QUIRE_STORAGE_DIR, value: /var/lib/quire-storage}
  - {name: QUIRE_CACHE_DIR, value: /var/cache/quire}
  - {name: HF_HOME, value: /var/cache/quire/huggingface}
  - {name: QUIRE_ALLOWED_HOSTS, value: {{ join "," .Values.hosts | quote }}}
  {{- range $name, $value := .Values.settings }}
  - {name: {{ $name }}, value: {{ $value | toString | quote }}}
  {{- end }}
  - name: POD_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  {{- if .Values.gatewayAPI.enabled }}
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  {{- end }}
envFrom:
  - secretRef: {name: {{ .Values.existingSecret }}}
{{- end -}}

{{- define "quire.mounts" -}}
- {name: scratch, mountPath: /tmp, subPath: tmp}
- {name: scratch, mountPath: /var/lib/quire, subPath: data}
{{- if include "quire.storageClaim" . }}
- {name: storage, mountPath: /var/lib/quire-storage}
{{- else }}
- {name: scratch, mountPath: /var/lib/quire-storage, subPath: storage}
{{- end }}
{{- if .Values.modelFiles.existingClaim }}
- {name: models, mountPath: {{ .Values.modelFiles.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "quire.volumes" -}}
- name: scratch
  emptyDir: {}
{{- with include "quire.storageClaim" . }}
- name: storage
  persistentVolumeClaim: {claimName: {{ . }}}
{{- end }}
{{- if .Values.modelFiles.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.modelFiles.existingClaim }}, readOnly: true}
{{- end }}
{{- end -}}

{{- /* A gateway's container. Of `.`: root, args (more of them). */ -}}
{{- define "quire.gatewayContainer" -}}
{{- $host := dict "name" "Host" "value" (first .root.Values.hosts) -}}
{{- $probe := dict "periodSeconds" 5 "timeoutSeconds" 3 -}}
{{- $live := merge (dict "httpGet" (dict "path" "/live" "port" "http" "httpHeaders" (list $host)) "failureThreshold" 6) $probe -}}
{{- $ready := merge (dict "httpGet" (dict "path" "/ready" "port" "http" "httpHeaders" (list $host)) "failureThreshold" 2) $probe -}}
{{- toYaml (dict
  "args" (concat (list "python" "manage.py" "gateway" "--host" "0.0.0.0" "--port" "8000") .args .root.Values.gateway.args)
  "ports" (list (dict "name" "http" "containerPort" 8000))
  "startupProbe" (merge (dict "failureThreshold" 60 "periodSeconds" 2) $live)
  "livenessProbe" $live
  "readinessProbe" $ready
) -}}
{{- end -}}

{{- /* Of `.`: root, own (the pod's values), name, resources, container. */ -}}
{{- define "quire.container" -}}
name: {{ .name }}
image: {{ include "quire.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- include "quire.containerSecurity" . | nindent 2 }}
{{ include "quire.environment" .root }}
{{- with .resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{ toYaml .container }}
volumeMounts:
  {{- include "quire.mounts" .root | nindent 2 }}
  {{- if .own.sharedMemory }}
  - {name: shared-memory, mountPath: /dev/shm}
  {{- end }}
  {{- if .own.tlsSecret }}
  - {name: tls, mountPath: /etc/quire/tls, readOnly: true}
  {{- end }}
  {{- if (.own.cache).size }}
  - {name: cache, mountPath: /var/cache/quire}
  {{- else }}
  - {name: scratch, mountPath: /var/cache/quire, subPath: cache}
  {{- end }}
{{- end -}}

{{- /* A pod of gateways, workers, pickers or a model's replicas. Of `.`: root, component, own (its values), container;
perhaps labels, and sidecar (a second container, `gateway`). */ -}}
{{- define "quire.pod" -}}
metadata:
  labels:
    {{- include "quire.labels" . | nindent 4 }}
    {{- with .labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .own.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "quire.name" .root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "quire.gracePeriod" .root }}
  securityContext:
    {{- include "quire.podSecurity" . | nindent 4 }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .own.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .own.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .own.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .own.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "quire.selector" $ | nindent 10 }}
    {{- end }}
  containers:
    - {{ include "quire.container" (dict "root" .root "own" .own "name" "quire" "resources" .own.resources "container" .container) | indent 6 | trim }}
    {{- with .sidecar }}
    - {{ include "quire.container" (dict "root" $.root "own" $.own "name" "gateway" "resources" $.root.Values.gatewayAPI.sidecarResources "container" .) | indent 6 | trim }}
    {{- end }}
  volumes:
    {{- include "quire.volumes" .root | nindent 4 }}
    {{- with .own.sharedMemory }}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ . }}}
    {{- end }}
    {{- with .own.tlsSecret }}
    - name: tls
      secret: {secretName: {{ . }}}
    {{- end }}
{{- end -}}

{{- /* Of a model's pods. `.`: its values. */ -}}
{{- define "quire.cacheClaim" -}}
{{- with .cache.size -}}
volumeClaimTemplates:
  - metadata: {name: cache}
    spec:
      accessModes: [ReadWriteOnce]
      {{- with $.cache.storageClass }}
      storageClassName: {{ . }}
      {{- end }}
      resources: {requests: {storage: {{ . }}}}
{{- end }}
{{- end -}}

{{- define "quire.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "quire.name" .root }}-{{ .component }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  {{- if not (.own.autoscaling).enabled }}
  replicas: {{ .own.replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "quire.selector" . | nindent 6 }}
  strategy:
    rollingUpdate: {maxUnavailable: 0, maxSurge: 1}
  template:
    {{- include "quire.pod" . | nindent 4 }}
{{- end -}}

{{- define "quire.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "quire.selector" . | nindent 6 }}
{{- end -}}
