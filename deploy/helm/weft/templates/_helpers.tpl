{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}

{{- define "weft.labels" -}}
app.kubernetes.io/name: weft
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: weft
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* metadata of an object: (list $ NAME COMPONENT) */ -}}
{{- define "weft.meta" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
labels:
  {{- include "weft.labels" $root | nindent 2 }}
  {{- with index . 2 }}
  app.kubernetes.io/component: {{ . }}
  {{- end }}
{{- with $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* the selector of a component's pods: (list $ COMPONENT) */ -}}
{{- define "weft.selector" -}}
app.kubernetes.io/name: weft
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- /* metadata of a component's pods: (list $ COMPONENT ANNOTATIONS) */ -}}
{{- define "weft.podMeta" -}}
{{- $root := index . 0 -}}
labels:
  {{- include "weft.labels" $root | nindent 2 }}
  app.kubernetes.io/component: {{ index . 1 }}
{{- with index . 2 }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "weft.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "weft.manager" -}}
{{- if not (or .Values.volmgr.enabled .Values.managerAddress) }}
{{- fail "volmgr.enabled is false and managerAddress is empty: agents and driver would have no manager" }}
{{- end }}
{{- .Values.managerAddress | default (include "weft.managers" .) -}}
{{- end }}

{{- /* how many managers the chart runs: a directory of one node is for one of them */ -}}
{{- define "weft.managerCount" -}}
{{- if eq .Values.volmgr.storage.type "hostPath" }}1{{ else }}{{ .Values.volmgr.replicas }}{{ end -}}
{{- end }}

{{- /* the addresses of the chart's managers; each has a Service, whose address stays when its pod moves */ -}}
{{- define "weft.managers" -}}
{{- $n := int (include "weft.managerCount" .) }}
{{- range $i := until $n }}
{{- if $i }},{{ end }}
{{- if eq $n 1 }}weft-volmgr{{ else }}weft-volmgr-{{ $i }}{{ end }}.{{ $.Release.Namespace }}.svc:{{ $.Values.volmgr.port }}
{{- end }}
{{- end }}

{{- /* flags of every daemon: (list $ METRICS-PORT) */ -}}
{{- define "weft.daemonArgs" -}}
{{- $v := (index . 0).Values -}}
- --log-level={{ $v.logLevel }}
- --log-format={{ $v.logFormat }}
- --metrics-listen=:{{ index . 1 }}
{{- if $v.tls.enabled }}
- --tls-ca=/etc/weft/tls/ca.crt
- --tls-cert=/etc/weft/tls/tls.crt
- --tls-key=/etc/weft/tls/tls.key
{{- else }}
- --insecure-plain-tcp
{{- end }}
{{- end }}

{{- /* the volume of a TLS secret: (list $ SECRET) */ -}}
{{- define "weft.tlsVolume" -}}
{{- if (index . 0).Values.tls.enabled -}}
- name: tls
  secret:
    secretName: {{ index . 1 }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{- define "weft.tlsMount" -}}
{{- if .Values.tls.enabled -}}
- name: tls
  mountPath: /etc/weft/tls
  readOnly: true
{{- end }}
{{- end }}

{{- /* the liveness probe of a daemon: PORT-NAME */ -}}
{{- define "weft.liveness" -}}
livenessProbe:
  httpGet:
    path: /healthz
    port: {{ . }}
  initialDelaySeconds: 10
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{- /* the security context of a container that needs no rights */ -}}
{{- define "weft.unprivileged" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- /* where a pod may be scheduled: its values */ -}}
{{- define "weft.placement" -}}
priorityClassName: {{ .priorityClassName }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* flags of labels: a map */ -}}
{{- define "weft.labelArgs" -}}
{{- range $k, $v := . }}
- {{ printf "--label=%s=%s" $k $v | quote }}
{{- end }}
{{- end }}

{{- /* the init container that turns the node's labels into failure domains */ -}}
{{- define "weft.labelsInit" -}}
{{- if .Values.topologyLabels -}}
initContainers:
  # Only this container uses Kubernetes' API. A restarted agent does not need it,
  # so that it can start when the API server is down.
  - name: labels
    image: {{ include "weft.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    args:
      - kubernetes
      - labels
      - --node=$(NODE_NAME)
      {{- range $label, $key := .Values.topologyLabels }}
      - {{ printf "--take=%s=%s" $label $key | quote }}
      {{- end }}
      - --write=/etc/weft/labels/labels
    env:
      - name: NODE_NAME
        valueFrom:
          fieldRef:
            fieldPath: spec.nodeName
    securityContext:
      runAsNonRoot: true
      runAsUser: 65532
      runAsGroup: 65532
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: [ALL]
      seccompProfile:
        type: RuntimeDefault
    terminationMessagePolicy: FallbackToLogsOnError
    resources:
      requests: {cpu: 10m, memory: 32Mi}
    volumeMounts:
      - name: labels
        mountPath: /etc/weft/labels
      - name: token
        mountPath: /var/run/secrets/kubernetes.io/serviceaccount
        readOnly: true
{{- end }}
{{- end }}

{{- define "weft.labelsMount" -}}
{{- if .Values.topologyLabels -}}
- name: labels
  mountPath: /etc/weft/labels
  readOnly: true
{{- end }}
{{- end }}

{{- define "weft.labelsVolume" -}}
{{- if .Values.topologyLabels -}}
- name: labels
  emptyDir: {}
{{- end }}
{{- end }}

{{- /* the account's token, only for the containers that need it */ -}}
{{- define "weft.tokenVolume" -}}
- name: token
  projected:
    sources:
      - serviceAccountToken:
          path: token
          expirationSeconds: 3600
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
{{- end }}

{{- /* While the node is drained, agent and driver stay until its volumes are
detached: the values of the node. */ -}}
{{- define "weft.waitDetached" -}}
{{- if .waitDetached -}}
lifecycle:
  preStop:
    exec:
      command: [weft, kubernetes, wait-detached, --timeout={{ sub .terminationGracePeriodSeconds 10 }}s]
{{- end }}
{{- end }}
