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

{{- /* who is answered: members of the cluster (closed), holders of the operator's certificates (tls), or
everyone (plain) */ -}}
{{- define "weft.mode" -}}
{{- if and .Values.tls.enabled .Values.insecurePlainTCP }}
{{- fail "tls.enabled and insecurePlainTCP: set one of them" }}
{{- end }}
{{- if .Values.tls.enabled }}tls{{ else if .Values.insecurePlainTCP }}plain
{{- else if .Values.volmgr.enabled | and (not .Values.managerAddress) }}closed
{{- else }}{{ fail "managers that this chart does not run cannot be asked to trust its pods: set tls.enabled or insecurePlainTCP" }}
{{- end }}
{{- end }}

{{- /* A release that runs over plain TCP has a store without an authority, which a closed manager refuses. */ -}}
{{- define "weft.refuseToClose" -}}
{{- if eq (include "weft.mode" .) "closed" }}
{{- $old := lookup "apps/v1" "StatefulSet" .Release.Namespace "weft-volmgr" }}
{{- range dig "spec" "template" "spec" "containers" list ($old | default dict) }}
{{- if has "--insecure-plain-tcp" (.args | default list) }}
{{- fail "this release runs over plain TCP, and its managers would not start closed: set insecurePlainTCP=true (docs/compatibility.md)" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* flags of every daemon: (list $ METRICS-PORT) */ -}}
{{- define "weft.daemonArgs" -}}
{{- $v := (index . 0).Values -}}
- --log-level={{ $v.logLevel }}
- --log-format={{ $v.logFormat }}
- --metrics-listen=:{{ index . 1 }}
{{- $mode := include "weft.mode" (index . 0) }}
{{- if eq $mode "tls" }}
- --tls-ca=/etc/weft/tls/ca.crt
- --tls-cert=/etc/weft/tls/tls.crt
- --tls-key=/etc/weft/tls/tls.key
{{- else if eq $mode "plain" }}
- --insecure-plain-tcp
{{- end }}
{{- end }}

{{- /* With which pods join the cluster: the token of their service account, and what they compare the
managers with before they show it. */ -}}
{{- define "weft.joinArgs" -}}
{{- if eq (include "weft.mode" .) "closed" -}}
- --join=kubernetes
{{- end }}
{{- end }}

{{- define "weft.joinMount" -}}
{{- if eq (include "weft.mode" .) "closed" -}}
- name: join
  mountPath: /var/run/secrets/weft.dev
  readOnly: true
{{- end }}
{{- end }}

{{- define "weft.joinVolume" -}}
{{- if eq (include "weft.mode" .) "closed" -}}
- name: join
  projected:
    sources:
      - serviceAccountToken: {path: token, audience: weft, expirationSeconds: 3600}
      # The manager makes it when the cluster is begun.
      - configMap:
          name: weft-authority
          optional: true
          items:
            - {key: authority, path: authority}
{{- end }}
{{- end }}

{{- /* where a member keeps its key and certificate: (list $ DIRECTORY) */ -}}
{{- define "weft.identityMount" -}}
{{- if eq (include "weft.mode" (index . 0)) "closed" -}}
- name: identity
  mountPath: {{ index . 1 }}
{{- end }}
{{- end }}

{{- /* on the node, so that it survives the pod: (list $ DIRECTORY) */ -}}
{{- define "weft.identityVolume" -}}
{{- if eq (include "weft.mode" (index . 0)) "closed" -}}
- name: identity
  hostPath:
    path: {{ index . 1 }}
    type: DirectoryOrCreate
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

{{- /* The request of a probe: (list $ PORT-NAME). With TLS, /metrics needs a certificate;
/healthz does not. */ -}}
{{- define "weft.healthz" -}}
httpGet:
  path: /healthz
  port: {{ index . 1 }}
  {{- if ne (include "weft.mode" (index . 0)) "plain" }}
  scheme: HTTPS
  {{- end }}
{{- end }}

{{- /* the liveness probe of a daemon: (list $ PORT-NAME) */ -}}
{{- define "weft.liveness" -}}
livenessProbe:
  {{- include "weft.healthz" . | nindent 2 }}
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

{{- /* not empty if storage nodes have guards */ -}}
{{- define "weft.guarded" -}}
{{- if and .Values.target.enabled (dig "guard" "enabled" false .Values.target) .Values.controller.enabled }}true{{ end }}
{{- end }}

{{- /* "true" if the cluster has what snapshots need, or the values say so */ -}}
{{- define "weft.snapshots" -}}
{{- $enabled := toString .Values.snapshots.enabled -}}
{{- if and .Values.controller.enabled (or (eq $enabled "true") (and (eq $enabled "auto") (.Capabilities.APIVersions.Has "snapshot.storage.k8s.io/v1"))) }}true{{ end -}}
{{- end }}

{{- /* "true" if the chart installs what tools for backups ask for the data of snapshots */ -}}
{{- define "weft.snapshotMetadata" -}}
{{- if and .Values.snapshotMetadata.enabled .Values.controller.enabled }}
{{- if not (include "weft.snapshots" .) }}
{{- fail "snapshotMetadata.enabled needs snapshots: the cluster lacks their CRDs, or snapshots.enabled is false" }}
{{- end }}
{{- with .Values.snapshotMetadata.certificate }}
{{- if ne (empty .secretName) (empty .caCert) }}
{{- fail "snapshotMetadata.certificate: set both secretName and caCert, or none" }}
{{- end }}
{{- end }}true
{{- end -}}
{{- end }}
